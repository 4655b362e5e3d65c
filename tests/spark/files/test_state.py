"""The files that batches keep for later ones: merged, checked, removed. Without Spark."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("pyspark")

from batchmill.spans import MOST_HOSTS, KnownHosts
from batchmill.spark import PipelineError
from batchmill.spark.files.state import (
    StateFiles,
    check_files,
    clock_step,
    expired_ids,
    ids_to_merge,
    is_old,
    kind_of,
    name_of,
    new_name,
    parts_of,
    pending_to_merge,
    publish,
    remove_unused,
)
from batchmill.spark.files.statefiles import StateKind, write_hosts, write_state
from batchmill.store import StreamFile
from tests.kit.files import small_disk

OLD = {StateKind.PENDING: "carry", StateKind.IDS: "seen"}
"""The folders of version 1."""


@pytest.mark.parametrize(
    ("moved_s", "passed_s", "step_s"),
    [
        (5.0, 5.0, 0.0),
        (300_000.0, 300_000.0, 0.0),
        (155.0, 5.0, 0.0),
        (156.0, 5.0, 151.0),
        (-146.0, 5.0, -151.0),
        (300.0, None, 0.0),
        (451.0, None, 151.0),
        (300_000.0, None, 299_700.0),
        (-151.0, None, -151.0),
    ],
)
def test_how_far_a_clock_was_set(moved_s: float, passed_s: float | None, step_s: float) -> None:
    """Up to a quarter of the window does not matter; a restart takes half of it at most."""
    assert clock_step(moved_s, passed_s, 600.0) == step_s


def state_file(
    checkpoint: Path, kind: StateKind, rows: int = 3, name: str = "1-abc-8"
) -> StreamFile:
    """A file as a batch publishes it: of two tasks, one of which kept a single row."""
    target = checkpoint / "state" / name
    tables = [{0: ["t"] * (rows - 2), 4: ["t"]}, {1: ["t"]}]
    pieces = [
        write_state(
            *(kind, {part: pa.table({"trace_id": ids}) for part, ids in parts.items()}, target),
            *(task, len(tables)),
        )
        for task, parts in enumerate(tables)
    ]
    (file,) = publish(pieces, target, 1, 0)
    assert file.rows == rows
    return file


def old_file(checkpoint: Path, kind: StateKind, rows: int = 3, name: str = "1-abc") -> StreamFile:
    """A file as version 1 wrote it: a row of it is a span."""
    target = checkpoint / OLD[kind] / name
    target.mkdir(parents=True)
    pq.write_table(pa.table({"trace_id": ["t"] * rows}), target / "part-0.parquet")
    (target / "_SUCCESS").touch()
    return StreamFile(f"file:{target}", 1, 0, rows)


def folder_of(file: StreamFile) -> Path:
    """Where a file lies."""
    return Path(file.path.removeprefix("file:"))


def grown(batches: int, *, expire: bool, every_ms: int = 1000) -> tuple[list[StreamFile], int]:
    """The files after so many batches of 10 rows, and how many rows were written for them."""
    alive: list[StreamFile] = []
    written = 0
    for number in range(batches):
        tick = number * every_ms
        merged = pending_to_merge(alive, tick=tick, wait_ms=80_000, expire=expire)
        rows = 10 + sum(file.rows for file in merged)
        alive = [file for file in alive if file not in merged]
        alive.append(StreamFile(f"file:/{number}", number, tick, rows))
        written += rows
    assert sum(file.rows for file in alive) == 10 * batches
    return alive, written


def test_files_of_one_time_are_merged() -> None:
    """An eighth of the wait is one time: nothing is kept for longer than that beyond its wait."""
    alive, _ = grown(20, expire=True)
    # 10,000 ms are one time; the ninth file of it takes the eight before it along.
    assert [file.rows for file in alive] == [90, 10, 90, 10]
    slow, _ = grown(20, expire=True, every_ms=10_000)
    assert len(slow) == 20


@pytest.mark.parametrize("every_ms", [1, 1000, 1_000_000])
def test_a_backfill_has_few_files_however_long_it_takes(every_ms: int) -> None:
    """Nothing expires in it, so the clock has no say; and rows are not written over and over."""
    alive, written = grown(2000, expire=False, every_ms=every_ms)
    assert len(alive) <= 8 + 8
    assert written <= 2000 * 10 * 11


def grown_ids(batches: int, *, expire: bool, every_ms: int, rows: int = 10) -> tuple[int, int]:
    """The most files of ids that there were at a time, and how often an id was written."""
    window_ms = 600_000
    alive: list[StreamFile] = []
    most = written = 0
    for number in range(batches):
        tick = number * every_ms
        if expire:
            gone = expired_ids(alive, tick, window_ms)
            assert all(file.arrived_ms <= tick - window_ms for file in gone)
            alive = [file for file in alive if file not in gone]
        merged = ids_to_merge(alive, tick=tick, window_ms=window_ms, expire=expire)
        total = rows + sum(file.rows for file in merged)
        alive = [file for file in alive if file not in merged]
        alive.append(StreamFile(f"file:/{number}", number, tick, total))
        written += total
        most = max(most, len(alive))
    if not expire:
        assert sum(file.rows for file in alive) == rows * batches
    return most, written // (rows * batches)


@pytest.mark.parametrize("every_ms", [200, 1000, 5000])
def test_files_of_ids_stay_few(every_ms: int) -> None:
    """However often batches come; and an id is written a few times only."""
    most, times = grown_ids(2000, expire=True, every_ms=every_ms)
    assert most <= 30
    assert times <= 10


def test_files_of_ids_of_a_backfill_stay_few() -> None:
    """Nothing expires in it."""
    most, times = grown_ids(2000, expire=False, every_ms=60_000)
    assert most <= 12
    assert times <= 12


def test_no_id_is_kept_much_longer_than_its_window() -> None:
    """Files are merged within a quarter of the window only."""
    old, *new = (StreamFile(f"file:/{ms}", 0, ms, 10) for ms in (149_999, 150_000, 150_001))
    assert ids_to_merge([old, *new], tick=150_002, window_ms=600_000, expire=True) == new
    assert ids_to_merge([old, new[0]], tick=150_001, window_ms=600_000, expire=True) == []
    assert expired_ids([old, *new], 749_999, 600_000) == [old]


@pytest.mark.parametrize(
    ("path", "kind", "name", "old"),
    [
        ("file:/x/state/3-abc-8/pending", StateKind.PENDING, "3-abc-8", False),
        ("file:/x/state/3-abc-8/ids", StateKind.IDS, "3-abc-8", False),
        ("file:/x/state/3-abc-8/ids/", StateKind.IDS, "3-abc-8", False),
        ("file:/x/carry/3-abc", StateKind.PENDING, "3-abc", True),
        ("file:/x/seen/3-abc", StateKind.IDS, "3-abc", True),
        ("file:/carry/state/3-abc-8/ids", StateKind.IDS, "3-abc-8", False),
        ("file:/x/seen/carry/3-abc", StateKind.PENDING, "3-abc", True),
    ],
)
def test_files_are_told_apart_by_their_folders(
    path: str, kind: StateKind, name: str, old: bool
) -> None:
    """Whatever the checkpoint is called."""
    file = StreamFile(path, 3, 0, 1)
    assert (kind_of(file), name_of(file), is_old(file)) == (kind, name, old)
    files = StateFiles.of([file])
    assert (file in files.pending, file in files.ids) == (
        kind is StateKind.PENDING,
        kind is StateKind.IDS,
    )


def test_a_name_says_into_how_many_parts_traces_are_divided() -> None:
    """And is another one each time: a batch that is run again does not touch the first files."""
    first, second = (new_name(7, 12) for _ in range(2))
    assert first != second
    assert parts_of(StreamFile(f"file:/x/state/{first}/ids", 7, 0, 1)) == 12


def test_all_of_a_file_is_made_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What tasks have written, before it gets its name; then that, and the folders above."""
    synced: list[tuple[Path, list[Path]]] = []
    sync = os.fsync

    def note(handle: int) -> None:
        path = Path(f"/proc/self/fd/{handle}").readlink()
        synced.append((path, sorted(path.iterdir()) if path.is_dir() else []))
        sync(handle)

    monkeypatch.setattr(os, "fsync", note)
    folder = folder_of(state_file(tmp_path, StateKind.PENDING))
    target = folder.parent
    assert all(path.parent == target and path.name.startswith(".") for path, _ in synced[:2])
    assert synced[2:] == [
        (folder, [folder / "0-2.arrow", folder / "1-2.arrow"]),
        (target, [folder]),
        (tmp_path / "state", [target]),
        (tmp_path, [tmp_path / "state"]),
    ]


def test_a_full_disk_is_not_filled_with_pieces(tmp_path: Path) -> None:
    """What could not be written whole is removed at once."""
    table = pa.table({"trace_id": [uuid.uuid4().hex for _ in range(40_000)]})
    with small_disk(tmp_path / "state") as small:
        with pytest.raises(OSError, match="No space left"):
            write_state(StateKind.PENDING, {0: table}, small / "1-abc-8")
        assert list((small / "1-abc-8").iterdir()) == []


WRITERS = pytest.mark.parametrize("write", [state_file, old_file], ids=["new", "version 1"])
KINDS = pytest.mark.parametrize(
    ("kind", "words", "fate"),
    [
        (StateKind.PENDING, "3 spans that wait for their partner", "be lost"),
        (StateKind.IDS, "3 ids of spans that were counted", "be counted again"),
    ],
)


@WRITERS
def test_whole_files_pass(tmp_path: Path, write: Callable[..., StreamFile]) -> None:
    """Also those that lie where this machine cannot look."""
    files = [write(tmp_path, kind) for kind in OLD]
    check_files([*files, StreamFile("s3://bucket/state/1-abc-8/ids", 1, 0, 5)])


def data(folder: Path) -> list[Path]:
    """The files of a folder that have rows."""
    return sorted(path for path in folder.iterdir() if path.suffix in (".arrow", ".parquet"))


def lose(folder: Path) -> None:
    """It is not where it was."""
    folder.rename(folder.with_name("x"))


def empty(folder: Path) -> None:
    """Its files are gone."""
    for path in data(folder):
        path.unlink()


def blank(folder: Path) -> None:
    """A file has no bytes."""
    data(folder)[0].write_bytes(b"")


def shorten(folder: Path) -> None:
    """A file has half of its bytes."""
    path = data(folder)[0]
    os.truncate(path, path.stat().st_size // 2)


@WRITERS
@KINDS
@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lose, "but it is gone"),
        (empty, "but it holds 0"),
        (blank, "but it cannot be read"),
        (shorten, "but it cannot be read"),
    ],
)
def test_state_that_is_lost_is_reported(
    tmp_path: Path,
    write: Callable[..., StreamFile],
    kind: StateKind,
    words: str,
    fate: str,
    spoil: Callable[[Path], object],
    why: str,
) -> None:
    """The error says what happened and what to do; no batch continues without it."""
    file = write(tmp_path, kind)
    spoil(folder_of(file))
    with pytest.raises(PipelineError, match=f"{words} .*{why}.*{fate}.*from a copy"):
        check_files([file])


@WRITERS
@KINDS
@pytest.mark.parametrize("actual", [2, 4])
def test_state_of_another_size_is_reported(
    tmp_path: Path,
    write: Callable[..., StreamFile],
    kind: StateKind,
    words: str,
    fate: str,
    actual: int,
) -> None:
    """Some rows are gone, or somebody else's are there."""
    written = write(tmp_path, kind, actual)
    file = StreamFile(written.path, written.batch, written.arrived_ms, 3)
    with pytest.raises(PipelineError, match=f"{words} .*it holds {actual}.*{fate}"):
        check_files([file])


def left(checkpoint: Path) -> set[str]:
    """The folders of state that are there."""
    places = ("state/*", "state/*/*", "carry/*", "seen/*")
    return {
        str(path.relative_to(checkpoint)) for place in places for path in checkpoint.glob(place)
    }


def test_files_that_no_commit_names_are_removed(tmp_path: Path) -> None:
    """Both kinds of a batch, one of them, and those of version 1; what is in use stays whole."""
    files = {
        name: [state_file(tmp_path, kind, name=name) for kind in OLD]
        for name in ("1-a-8", "2-b-8", "3-c-8", "4-d-8")
    }
    carry, seen = (old_file(tmp_path, kind, name="1-used") for kind in OLD)
    for kind in OLD:
        old_file(tmp_path, kind, name="2-unused")
    used = [*files["1-a-8"], files["2-b-8"][0], files["3-c-8"][1], carry, seen]
    remove_unused(tmp_path, used)
    assert left(tmp_path) == {
        *("state/1-a-8", "state/1-a-8/pending", "state/1-a-8/ids"),
        *("state/2-b-8", "state/2-b-8/pending"),
        *("state/3-c-8", "state/3-c-8/ids"),
        *("carry/1-used", "seen/1-used"),
    }
    check_files(used)
    remove_unused(tmp_path, [seen])
    assert left(tmp_path) == {"seen/1-used"}
    remove_unused(tmp_path, [])
    assert left(tmp_path) == set()
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_what_tasks_left_that_were_run_again_is_removed(tmp_path: Path) -> None:
    """Beside what is in use; the hosts may be in use for ever."""
    hosts = state_file(tmp_path, StateKind.IDS, name="1-a-8")
    piece = write_state(StateKind.IDS, {0: pa.table({"trace_id": ["t"]})}, folder_of(hosts).parent)
    assert Path(piece.path).exists()
    remove_unused(tmp_path, [hosts])
    assert not Path(piece.path).exists()
    check_files([hosts])
    assert not (tmp_path / "carry").exists()


def test_known_hosts_are_bounded(tmp_path: Path) -> None:
    """Of more that have answered it is only known that they are too many."""
    target = tmp_path / "state" / "1-a-8"
    hosts = KnownHosts(frozenset({"b.org", "a.org"}), {"legacy:8080": 3, "crm": 1})
    (few,) = publish([write_hosts(hosts, target)], target, 1, 0)
    assert StateFiles.of([few]).known_hosts(tmp_path) == hosts
    target = tmp_path / "state" / "2-b-8"
    many = [f"{'x' * 200}{number}.org" for number in range(5 * MOST_HOSTS)]
    silent = {f"{'x' * 200}:{number}": 3 for number in range(MOST_HOSTS)}
    (file,) = publish([write_hosts(KnownHosts(frozenset(many), silent), target)], target, 2, 0)
    assert StateFiles.of([file]).known_hosts(tmp_path) is None
    assert sum(path.stat().st_size for path in folder_of(file).iterdir()) < 6 * 2**20


def test_hosts_that_an_older_version_kept_have_answered(tmp_path: Path) -> None:
    """It kept no others."""
    target = tmp_path / "state" / "1-a-8"
    piece = write_state(StateKind.HOSTS, {0: pa.table({"host": ["a.org"]})}, target)
    (file,) = publish([piece], target, 1, 0)
    assert StateFiles.of([file]).known_hosts(tmp_path) == KnownHosts(frozenset({"a.org"}))


def test_a_checkpoint_without_state_has_nothing_to_remove(tmp_path: Path) -> None:
    """As that of a stream without spans; and what lies elsewhere is not this machine's."""
    remove_unused(tmp_path, [StreamFile("s3://bucket/state/1-abc-8/ids", 1, 0, 5)])
    assert list(tmp_path.iterdir()) == []
