"""The files that batches keep for later ones: merged, checked, removed. Without Spark."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("pyspark")

from batchmill.spark import PipelineError
from batchmill.spark.batch.blobs import Kind
from batchmill.spark.batch.state import (
    StateFiles,
    check_files,
    expired_ids,
    ids_to_merge,
    is_old,
    kind_of,
    name_of,
    new_name,
    parts_of,
    pending_to_merge,
    remove_unused,
)
from batchmill.spark.input.segments import sync_folder
from batchmill.store import Carry

OLD = {Kind.PENDING: "carry", Kind.IDS: "seen"}
"""The folders of version 1."""


def state_file(checkpoint: Path, kind: Kind, rows: int = 3, name: str = "1-abc-8") -> Carry:
    """A file as a batch writes it: blobs, of which one has a single row."""
    target = checkpoint / "state" / name / f"kind={kind}"
    target.mkdir(parents=True)
    blobs = {
        "source": [name] * 2,
        "part": pa.array([0, 1], pa.int32()),
        "rows": [rows - 1, 1],
        "data": [b"many", b"one"],
    }
    pq.write_table(pa.table(blobs), target / "part-0.parquet")
    (target / ".part-0.parquet.crc").write_bytes(b"crc")
    (target.parent / "_SUCCESS").touch()
    return Carry(f"file:{target}", 1, 0, rows)


def old_file(checkpoint: Path, kind: Kind, rows: int = 3, name: str = "1-abc") -> Carry:
    """A file as version 1 wrote it: a row of it is a span."""
    target = checkpoint / OLD[kind] / name
    target.mkdir(parents=True)
    pq.write_table(pa.table({"trace_id": ["t"] * rows}), target / "part-0.parquet")
    (target / "_SUCCESS").touch()
    return Carry(f"file:{target}", 1, 0, rows)


def folder_of(file: Carry) -> Path:
    """Where a file lies."""
    return Path(file.path.removeprefix("file:"))


def grown(batches: int, *, expire: bool, every_ms: int = 1000) -> tuple[list[Carry], int]:
    """The files after so many batches of 10 rows, and how many rows were written for them."""
    alive: list[Carry] = []
    written = 0
    for number in range(batches):
        tick = number * every_ms
        merged = pending_to_merge(alive, tick=tick, wait_ms=80_000, expire=expire)
        rows = 10 + sum(file.rows for file in merged)
        alive = [file for file in alive if file not in merged]
        alive.append(Carry(f"file:/{number}", number, tick, rows))
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
    alive: list[Carry] = []
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
        alive.append(Carry(f"file:/{number}", number, tick, total))
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
    old, *new = (Carry(f"file:/{ms}", 0, ms, 10) for ms in (149_999, 150_000, 150_001))
    assert ids_to_merge([old, *new], tick=150_002, window_ms=600_000, expire=True) == new
    assert ids_to_merge([old, new[0]], tick=150_001, window_ms=600_000, expire=True) == []
    assert expired_ids([old, *new], 749_999, 600_000) == [old]


@pytest.mark.parametrize(
    ("path", "kind", "name", "old"),
    [
        ("file:/x/state/3-abc-8/kind=pending", Kind.PENDING, "3-abc-8", False),
        ("file:/x/state/3-abc-8/kind=ids", Kind.IDS, "3-abc-8", False),
        ("file:/x/state/3-abc-8/kind=ids/", Kind.IDS, "3-abc-8", False),
        ("file:/x/carry/3-abc", Kind.PENDING, "3-abc", True),
        ("file:/x/seen/3-abc", Kind.IDS, "3-abc", True),
        ("file:/carry/state/3-abc-8/kind=ids", Kind.IDS, "3-abc-8", False),
        ("file:/x/seen/carry/3-abc", Kind.PENDING, "3-abc", True),
    ],
)
def test_files_are_told_apart_by_their_folders(path: str, kind: Kind, name: str, old: bool) -> None:
    """Whatever the checkpoint is called."""
    file = Carry(path, 3, 0, 1)
    assert (kind_of(file), name_of(file), is_old(file)) == (kind, name, old)
    files = StateFiles.of([file])
    assert (file in files.pending, file in files.ids) == (kind is Kind.PENDING, kind is Kind.IDS)


def test_a_name_says_into_how_many_parts_traces_are_divided() -> None:
    """And is another one each time: a batch that is run again does not touch the first files."""
    first, second = (new_name(7, 12) for _ in range(2))
    assert first != second
    assert parts_of(Carry(f"file:/x/state/{first}/kind=ids", 7, 0, 1)) == 12


def test_all_of_a_folder_is_made_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files, Hadoop's checksums among them, and the entries of the folders above."""
    target = folder_of(state_file(tmp_path, Kind.PENDING))
    synced = []
    sync = os.fsync

    def note(handle: int) -> None:
        synced.append(Path(f"/proc/self/fd/{handle}").readlink())
        sync(handle)

    monkeypatch.setattr(os, "fsync", note)
    sync_folder(target)
    assert set(synced[:2]) == {target / name for name in ("part-0.parquet", ".part-0.parquet.crc")}
    assert synced[2:] == [target, target.parent, target.parent.parent]


WRITERS = pytest.mark.parametrize("write", [state_file, old_file], ids=["new", "version 1"])
KINDS = pytest.mark.parametrize(
    ("kind", "words", "fate"),
    [
        (Kind.PENDING, "3 spans that wait for their partner", "be lost"),
        (Kind.IDS, "3 ids of spans that were counted", "be counted again"),
    ],
)


@WRITERS
def test_whole_files_pass(tmp_path: Path, write: Callable[..., Carry]) -> None:
    """Also those that lie where this machine cannot look."""
    files = [write(tmp_path, kind) for kind in OLD]
    check_files([*files, Carry("s3://bucket/state/1-abc-8/kind=ids", 1, 0, 5)])


@WRITERS
@KINDS
@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda folder: folder.rename(folder.with_name("x")), "but it is gone"),
        (lambda folder: (folder / "part-0.parquet").unlink(), "but it holds 0"),
        (lambda folder: (folder / "part-0.parquet").write_bytes(b""), "but it cannot be read"),
        (lambda folder: os.truncate(folder / "part-0.parquet", 20), "but it cannot be read"),
    ],
    ids=["gone", "emptied", "no bytes", "truncated"],
)
def test_state_that_is_lost_is_reported(
    tmp_path: Path,
    write: Callable[..., Carry],
    kind: Kind,
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
    tmp_path: Path, write: Callable[..., Carry], kind: Kind, words: str, fate: str, actual: int
) -> None:
    """Some rows are gone, or somebody else's are there."""
    written = write(tmp_path, kind, actual)
    file = Carry(written.path, written.batch, written.arrived_ms, 3)
    with pytest.raises(PipelineError, match=f"{words} .*it holds {actual}.*{fate}"):
        check_files([file])


def left(checkpoint: Path) -> set[str]:
    """The folders of state that are there."""
    places = ("state/*", "state/*/kind=*", "carry/*", "seen/*")
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
        *("state/1-a-8", "state/1-a-8/kind=pending", "state/1-a-8/kind=ids"),
        *("state/2-b-8", "state/2-b-8/kind=pending"),
        *("state/3-c-8", "state/3-c-8/kind=ids"),
        *("carry/1-used", "seen/1-used"),
    }
    check_files(used)
    remove_unused(tmp_path, [seen])
    assert left(tmp_path) == {"seen/1-used"}
    remove_unused(tmp_path, [])
    assert left(tmp_path) == set()


def test_a_checkpoint_without_state_has_nothing_to_remove(tmp_path: Path) -> None:
    """As that of a stream without spans; and what lies elsewhere is not this machine's."""
    remove_unused(tmp_path, [Carry("s3://bucket/state/1-abc-8/kind=ids", 1, 0, 5)])
    assert list(tmp_path.iterdir()) == []
