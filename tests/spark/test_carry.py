"""Files of spans that wait: merged, made durable, and checked; without Spark."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("pyspark")

from batchmill.spark import PipelineError
from batchmill.spark.spans.carry import check, make_durable, to_merge
from batchmill.store import Carry


def grown(batches: int, *, expire: bool, every_ms: int = 1000) -> tuple[list[Carry], int]:
    """The files after so many batches of 10 rows, and how many rows were written for them."""
    alive: list[Carry] = []
    written = 0
    for number in range(batches):
        tick = number * every_ms
        merged = to_merge(alive, tick=tick, rows=10, wait_ms=80_000, expire=expire)
        rows = 10 + sum(each.rows for each in merged)
        alive = [each for each in alive if each not in merged]
        alive.append(Carry(f"file:/{number}", number, tick, rows))
        written += rows
    assert sum(each.rows for each in alive) == 10 * batches
    return alive, written


def test_files_of_one_time_are_merged() -> None:
    """An eighth of the wait is one time: nothing is kept for longer than that beyond its wait."""
    alive, _ = grown(20, expire=True)
    # 10,000 ms are one time; the ninth file of it takes the eight before it along.
    assert [each.rows for each in alive] == [90, 10, 90, 10]
    slow, _ = grown(20, expire=True, every_ms=10_000)
    assert len(slow) == 20


@pytest.mark.parametrize("every_ms", [1, 1000, 1_000_000])
def test_a_backfill_has_few_files_however_long_it_takes(every_ms: int) -> None:
    """Nothing expires in it, so the clock has no say; and rows are not written over and over."""
    alive, written = grown(2000, expire=False, every_ms=every_ms)
    assert len(alive) <= 8 + 8
    assert written <= 2000 * 10 * 11


def carried(folder: Path, rows: int = 3) -> Carry:
    """A folder of waiting spans."""
    target = folder / "carry" / "1-abc"
    target.mkdir(parents=True)
    pq.write_table(pa.table({"trace_id": ["t"] * rows}), target / "part-0.parquet")
    (target / "_SUCCESS").touch()
    (target / ".part-0.parquet.crc").write_bytes(b"crc")
    return Carry(f"file:{target}", 1, 0, rows)


def test_all_of_a_folder_is_made_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files, Hadoop's checksums among them, and the entries of the folders above."""
    target = Path(carried(tmp_path).path.removeprefix("file:"))
    synced = []
    sync = os.fsync

    def note(handle: int) -> None:
        synced.append(Path(f"/proc/self/fd/{handle}").readlink())
        sync(handle)

    monkeypatch.setattr(os, "fsync", note)
    make_durable(target)
    files = {target / each for each in ("part-0.parquet", "_SUCCESS", ".part-0.parquet.crc")}
    assert set(synced[:3]) == files
    assert synced[3:] == [target, target.parent, tmp_path]


def test_whole_files_pass(tmp_path: Path) -> None:
    """Also those that lie where this machine cannot look."""
    check([carried(tmp_path), Carry("s3://bucket/carry/1", 1, 0, 5)])


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda folder: folder.rename(folder.with_name("x")), "but it is gone"),
        (lambda folder: (folder / "part-0.parquet").unlink(), "but it holds 0"),
        (lambda folder: (folder / "part-0.parquet").write_bytes(b""), "but it cannot be read"),
        (lambda folder: os.truncate(folder / "part-0.parquet", 20), "but it cannot be read"),
    ],
)
def test_spans_that_are_lost_are_told(tmp_path: Path, spoil: object, why: str) -> None:
    """What happened and what to do; never a batch that goes on without them."""
    assert callable(spoil)
    carry = carried(tmp_path)
    spoil(Path(carry.path.removeprefix("file:")))
    with pytest.raises(PipelineError, match=f"3 spans that wait .*{why}.*back from a copy"):
        check([carry])
