"""SQLite's own troubles: full disks, files that are none, other writers."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchmill.store import (
    NotAStoreError,
    StoreFullError,
    StoreInUseError,
    StoreMissingError,
    StoreReadOnlyError,
    StoreUnavailableError,
    StoreVersionError,
    open_store,
    sqlite,
)
from batchmill.store.sql import schema
from batchmill.store.sql.session import Session
from batchmill.store.sqlite import (
    NO_ROOM_BYTES,
    SqliteStore,
    is_full,
    lock_path,
    store_error,
)
from tests.kit.stores import HASTY, Backend, Measurement, Writer, all_states, expected_states

MANY = [Measurement(number, entity=f"e{number}") for number in range(3000)]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Backend]:
    """A file for a store."""
    backend = Backend(f"sqlite:///{tmp_path}/store.db")
    yield backend
    backend.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of sixteen megabytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, timeout=30, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode:
        pytest.skip(f"a small file system cannot be mounted: {done.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], timeout=30, check=True)


def sqlite_store(backend: Backend) -> SqliteStore:
    """A store in a file."""
    store = backend.open()
    assert isinstance(store, SqliteStore)
    return store


def test_a_full_database_is_reported_and_loses_nothing(place: Backend) -> None:
    """SQLite out of pages: a clear error, what was there stays, and the batch goes in later."""
    store = sqlite_store(place)
    writer = Writer(store)
    writer.write(Measurement(1))
    store._writer.execute("PRAGMA max_page_count = 60")
    batch = writer.batch(MANY)
    with pytest.raises(StoreFullError, match="make room") as caught:
        store.commit(batch)
    assert caught.value.where == str(store.path)
    assert caught.value.free_bytes is not None
    assert all_states(store) == expected_states(writer.metrics, [Measurement(1)])
    store._writer.execute("PRAGMA max_page_count = 1000000")
    assert store.commit(batch).applied
    assert all_states(store) == expected_states(writer.metrics, [Measurement(1), *MANY])


@pytest.mark.parametrize(
    ("free", "full"),
    [(0, True), (1, True), (NO_ROOM_BYTES - 1, True), (NO_ROOM_BYTES, False), (None, False)],
)
def test_how_little_room_is_none(free: int | None, full: bool) -> None:
    """Nothing free is less than anything; not to know it proves nothing."""
    assert is_full(free) is full


def test_a_disk_without_a_single_byte_is_full(small_disk: Path) -> None:
    """A failed write with nothing free is a full disk, whatever SQLite calls it."""
    (small_disk / "ballast").write_bytes(b"x" * shutil.disk_usage(small_disk).free)
    fault = sqlite3.OperationalError("disk I/O error")
    fault.sqlite_errorcode = sqlite3.SQLITE_IOERR_WRITE
    assert shutil.disk_usage(small_disk).free == 0
    error = store_error(fault, "url", small_disk / "store.db")
    assert isinstance(error, StoreFullError)
    assert ", 0 bytes free" in str(error)


def test_a_full_disk_is_reported_and_loses_nothing(small_disk: Path) -> None:
    """A real disk without room: a clear error, and the batch goes in once there is some."""
    backend = Backend(f"sqlite:///{small_disk}/store.db")
    try:
        store = backend.open()
        writer = Writer(store)
        writer.write(Measurement(1))
        batch = writer.batch(MANY)
        ballast = small_disk / "ballast"
        ballast.write_bytes(b"x" * (shutil.disk_usage(small_disk).free - 100_000))
        with pytest.raises(StoreFullError) as caught:
            store.commit(batch)
        assert "bytes free" in str(caught.value)
        assert all_states(store) == expected_states(writer.metrics, [Measurement(1)])
        ballast.unlink()
        assert store.commit(batch).applied
        assert len(store.values("calls")) == len(MANY) + 1
    finally:
        backend.close()


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    """Some other file is not touched, and named."""
    file = tmp_path / "notes.db"
    file.write_text("shopping list: milk, eggs, flour\n" * 200)
    before = file.read_bytes()
    with pytest.raises(NotAStoreError, match=r"notes\.db"):
        open_store(f"sqlite:///{file}")
    assert file.read_bytes() == before


def test_a_damaged_file_is_reported(place: Backend, tmp_path: Path) -> None:
    """A store whose pages were overwritten is an error that says so, not a wrong value."""
    store = place.open()
    Writer(store).write(*MANY)
    store.close()
    file = tmp_path / "store.db"
    content = bytearray(file.read_bytes())
    content[8192 * 2 :] = b"\xa5" * (len(content) - 8192 * 2)
    file.write_bytes(content)
    with pytest.raises(NotAStoreError, match="restore"):
        place.open().values("calls")


def test_another_programs_database_is_refused(tmp_path: Path) -> None:
    """A database with a table of ours by name only is left alone."""
    file = tmp_path / "other.db"
    with sqlite3.connect(file) as connection:
        connection.execute("CREATE TABLE meta (colour TEXT)")
    connection.close()
    with pytest.raises(NotAStoreError, match="not batchmill's"):
        open_store(f"sqlite:///{file}")


def test_a_store_that_should_be_there_is_not_made(tmp_path: Path) -> None:
    """A reader's mistyped path is an error, and leaves no file behind."""
    for path in (tmp_path / "none.db", tmp_path / "no" / "folder.db"):
        with pytest.raises(StoreMissingError, match="check the address"):
            open_store(f"sqlite:///{path}", create=False)
        assert not path.exists()
    with pytest.raises(StoreMissingError):
        open_store(f"sqlite:///{tmp_path}/no/folder.db")
    with pytest.raises(NotAStoreError, match="folder"):
        open_store(f"sqlite:///{tmp_path}")


def test_a_newer_store_is_refused(backend: Backend) -> None:
    """What a newer batchmill wrote is not touched by an older one; on both backends."""
    store = backend.open()
    newer = "UPDATE meta SET value = '99' WHERE key = 'schema_version'"
    store._write(lambda session: session.run(newer))
    with pytest.raises(StoreVersionError, match="use the newer batchmill") as caught:
        backend.open()
    assert (caught.value.found, caught.value.supported) == (99, len(schema.MIGRATIONS))


def test_an_older_store_is_migrated(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening it runs the steps that it lacks, once, and keeps what is in it."""
    store = backend.open()
    writer = Writer(store)
    writer.write(Measurement(30))
    store.close()

    def step(session: Session) -> None:
        session.run(f"ALTER TABLE stream ADD COLUMN note {session.dialect.text}")
        session.run("UPDATE stream SET note = 'migrated'")

    monkeypatch.setattr(schema, "MIGRATIONS", [*schema.MIGRATIONS, step])
    for _ in range(2):
        again = backend.open()
        rows = again._read(lambda session: session.rows("SELECT note FROM stream"))
        assert rows == [("migrated",)]
        assert all_states(again) == expected_states(writer.metrics, [Measurement(30)])


def test_a_migration_that_fails_changes_nothing(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All steps are one transaction: the store stays as it was, and opens with the old version."""
    store = backend.open()
    store.close()

    def good(session: Session) -> None:
        session.run(f"ALTER TABLE stream ADD COLUMN note {session.dialect.text}")

    def bad(session: Session) -> None:
        raise RuntimeError("no")

    with monkeypatch.context() as patch:
        patch.setattr(schema, "MIGRATIONS", [*schema.MIGRATIONS, good, bad])
        with pytest.raises(RuntimeError):
            backend.open()
    assert backend.open().id == store.id


@contextlib.contextmanager
def not_as_root() -> Iterator[None]:
    """Give up root's rights, which would overrule the permissions of files."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)  # nobody
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_store_without_write_permission_is_reported() -> None:
    """Writing a file that may only be read raises an error that names the missing permission."""
    # Not in tmp_path, whose parent only its owner may enter.
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/store.db"
        open_store(url).close()
        Path(folder, "store.db").chmod(0o444)
        Path(folder).chmod(0o555)
        with not_as_root(), pytest.raises(StoreReadOnlyError, match="right to write"):
            open_store(url).claim("live", "c", fresh=True, committed=None)
        Path(folder).chmod(0o755)


def test_a_read_only_database_is_reported(place: Backend) -> None:
    """SQLite's refusal to write says what to do; reading goes on."""
    store = sqlite_store(place)
    writer = Writer(store)
    writer.write(Measurement(1))
    store._writer.execute("PRAGMA query_only = ON")
    with pytest.raises(StoreReadOnlyError, match="nothing was changed"):
        store.commit(writer.batch([Measurement(2)]))
    assert len(store.values("calls")) == 1


def test_a_busy_database_is_waited_for(place: Backend, tmp_path: Path) -> None:
    """Another program's transaction holds a commit up; it goes in once that one is through."""
    store = sqlite_store(place)
    writer = Writer(store)
    store._writer.execute("PRAGMA busy_timeout = 0")
    blocker = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            blocker.execute("COMMIT")

    store.retrier.wait = wait
    writer.write(Measurement(1))
    blocker.close()
    assert len(waits) == 3
    assert waits == sorted(waits)


def test_a_database_that_stays_busy_is_given_up(place: Backend, tmp_path: Path) -> None:
    """The error says what was tried; the batch is not in."""
    store = place.open(retry=HASTY)
    assert isinstance(store, SqliteStore)
    writer = Writer(store)
    store._writer.execute("PRAGMA busy_timeout = 0")
    blocker = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreUnavailableError, match="locked") as caught:
        store.commit(writer.batch([Measurement(1)]))
    blocker.close()
    assert caught.value.attempts > 1
    writer.write(Measurement(1))


def test_a_commit_is_on_the_disk_when_it_returns(place: Backend) -> None:
    """Write-ahead log, synced at every commit: what a power cut must not undo."""
    store = sqlite_store(place)
    assert store._writer.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert store._writer.execute("PRAGMA synchronous").fetchone() == (2,)


def test_the_log_of_a_large_commit_is_cut_back(
    place: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the size that is set; by the next commit that finds it copied to the database."""
    assert sqlite.WAL_BYTES == 256 * 2**20, "docs/operations.md has this number"
    monkeypatch.setattr(sqlite, "WAL_BYTES", 100_000)
    log = tmp_path / "store.db-wal"
    store = sqlite_store(place)
    rows = Writer(store)
    rows.write(*MANY)
    assert log.stat().st_size > 300_000
    store._writer.execute("PRAGMA wal_checkpoint")  # as SQLite does by itself, after 1,000 pages
    rows.write(Measurement(1))
    assert log.stat().st_size <= 100_000


def test_each_stream_has_a_lock_of_its_own(place: Backend, tmp_path: Path) -> None:
    """Names that look alike as file names are still different streams."""
    store, other = place.open(), place.open()
    store.claim("a/b", "c1", fresh=True, committed=None)
    other.claim("a:b", "c2", fresh=True, committed=None)
    with pytest.raises(StoreInUseError):
        other.claim("a/b", "c1", fresh=False, committed=None)
    assert lock_path(tmp_path / "store.db", "a/b").parent == tmp_path


def test_locks_of_streams_that_have_ended_are_removed(place: Backend, tmp_path: Path) -> None:
    """By the next claim: each backfill has a name of its own."""
    store, other = place.open(), place.open()
    other.claim("other", "c0", fresh=True, committed=None)
    for number in range(20):
        store.claim(f"backfill-rows-Span-{number}", "c1", fresh=True, committed=None)
        store.release(f"backfill-rows-Span-{number}")
    store.claim("main", "c2", fresh=True, committed=None)
    locks = {lock_path(tmp_path / "store.db", stream) for stream in ("main", "other")}
    assert set(tmp_path.glob("*.lock")) == locks
    with pytest.raises(StoreInUseError):
        store.claim("other", "c0", fresh=False, committed=None)
