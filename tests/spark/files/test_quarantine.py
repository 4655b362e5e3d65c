"""The quarantine keeps no more than it may."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("pyspark")

from batchmill.spark.files.paths import AnyPath, HadoopPath
from batchmill.spark.files.quarantine import MOST_ENTRIES, Quarantine
from batchmill.spark.input.segments import BadSegment

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(params=["local", "hadoop"])
def folder(request: pytest.FixtureRequest, spark: SparkSession, tmp_path: Path) -> AnyPath:
    """The test's folder: as a local one, and as one that is opened through the JVM."""
    if request.param == "local":
        return tmp_path
    return HadoopPath(f"file:{tmp_path}", lambda: spark)


def kept(folder: Path) -> set[str]:
    """The names of what is there."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def add(path: Path, size: int, age: int) -> None:
    """A file of that size, and its folder, both written at that time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    for changed in (path, path.parent):
        os.utime(changed, (age, age))


def test_the_oldest_is_removed(
    folder: AnyPath, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Segments with their reasons, rows and deltas; in any event type."""
    add(tmp_path / "Span" / "rows-main-1" / "0.parquet", 60, age=1)
    add(tmp_path / "Span" / "rows-main-1" / "1.parquet", 40, age=1)
    add(tmp_path / "Span" / "a.parquet", 100, age=2)
    add(tmp_path / "Span" / "a.parquet.reason", 10, age=2)
    add(tmp_path / "Endpoint" / "deltas-main-7.parquet", 100, age=3)
    add(tmp_path / "Span" / "b.parquet", 100, age=4)
    add(tmp_path / "Span" / "b.parquet.reason", 10, age=4)
    everything = kept(tmp_path)
    assert Quarantine(folder).trim(400) == 0
    assert kept(tmp_path) == everything
    with caplog.at_level(logging.WARNING, "batchmill.spark"):
        assert Quarantine(folder).trim(250) == 200
    assert "the oldest 200 bytes were removed" in caplog.text
    last = {"Endpoint/deltas-main-7.parquet", "Span/b.parquet", "Span/b.parquet.reason"}
    assert kept(tmp_path) == last
    assert Quarantine(folder).trim(0) == 200
    assert kept(tmp_path) == set()


def test_it_is_listed_only_after_it_has_grown(folder: AnyPath, tmp_path: Path) -> None:
    """On other file systems, where that costs something: not every ten seconds."""
    quarantine = Quarantine(folder / "quarantine")
    assert quarantine.trim(0) == 0
    add(tmp_path / "quarantine" / "Span" / "a.parquet", 100, age=1)
    assert quarantine.trim(100) == 0
    assert isinstance(folder, Path) or quarantine.trim(0) == 0
    add(tmp_path / "spool" / "b.parquet", 50, age=2)
    bad = BadSegment(str(tmp_path / "spool" / "b.parquet"), "Span", "corrupt", "it is cut off")
    quarantine.add_segment(bad)
    assert quarantine.trim(60) == 100
    assert "Span/b.parquet.reason" in kept(tmp_path / "quarantine")


def test_a_reason_without_a_copy_stays(folder: AnyPath, tmp_path: Path) -> None:
    """Its segment is still in the spool, and would be removed there. Nor is a batch disturbed."""
    add(tmp_path / "Span" / "c.parquet.reason", 10, age=1)
    (tmp_path / ".main-7" / "Span").mkdir(parents=True)
    (tmp_path / ".main-7" / "Span" / "x.part").touch()
    assert Quarantine(folder).trim(0) == 0
    assert kept(tmp_path) == {"Span/c.parquet.reason", ".main-7/Span/x.part"}
    assert Quarantine(folder / "none").trim(0) == 0


def test_a_reason_goes_once_its_segment_is_gone(folder: AnyPath, tmp_path: Path) -> None:
    """Of a segment that was missing there was never a copy."""
    quarantine, spool = Quarantine(folder / "quarantine"), tmp_path / "spool" / "Span"
    spool.mkdir(parents=True)
    for name in ("gone", "there"):
        path = f"{spool}/{name}.parquet"
        quarantine.add_segment(BadSegment(path, "Span", "missing", "it is not there any more"))
    (spool / "there.parquet").touch()
    assert quarantine.trim(0) > 0
    left = kept(tmp_path / "quarantine")
    assert left - {"Span/.there.parquet.reason.crc"} == {"Span/there.parquet.reason"}


def test_entries_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However small: a batch with one invalid row after the other."""
    assert MOST_ENTRIES == 10_000, "docs/operations.md has this number"
    monkeypatch.setattr("batchmill.spark.files.quarantine.MOST_ENTRIES", 5)
    quarantine = Quarantine(tmp_path)
    for number in range(30):
        staging = Path(str(quarantine.staging("main", number)), "Span")
        staging.mkdir(parents=True)
        (staging / "a").write_bytes(b"x")
        quarantine.add_rows("main", number, [("Span", str(staging / "a"))])
        os.utime(tmp_path / "Span" / f"rows-main-{number}", (number, number))
        quarantine.trim(2**30)
        assert len(list(tmp_path.glob("*/*"))) <= 5
    left = {f"Span/rows-main-{number}/0.parquet" for number in range(25, 30)}
    assert kept(tmp_path) == left
    assert "the oldest 1 byte were removed" in caplog.text


def test_what_was_being_written_a_day_ago_is_removed(folder: AnyPath, tmp_path: Path) -> None:
    """By a process that was killed, a backfill for example, whose name never comes again."""
    add(tmp_path / ".backfill-rows-Span-1f-0" / "x", 10, age=1)
    add(tmp_path / "Span" / ".a.parquet.part", 10, age=1)
    add(tmp_path / "Span" / ".a.parquet.reason.1f.tmp", 10, age=1)
    (tmp_path / ".main-7").mkdir()
    (tmp_path / "Span" / ".b.parquet.part").touch()
    assert Quarantine(folder).trim(0) == 0
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("**/.*")) == [
        ".main-7",
        "Span/.b.parquet.part",
    ]
