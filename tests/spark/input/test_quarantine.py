"""The quarantine keeps no more than it may."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from batchmill.spark.input.quarantine import Quarantine


def kept(folder: Path) -> set[str]:
    """The names of what is there."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def add(path: Path, size: int, age: int) -> None:
    """A file of that size, and its folder, both written at that time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    for changed in (path, path.parent):
        os.utime(changed, (age, age))


def test_the_oldest_is_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Segments with their reasons, rows and deltas; in any event type."""
    add(tmp_path / "Span" / "rows-main-1" / "0.parquet", 60, age=1)
    add(tmp_path / "Span" / "rows-main-1" / "1.parquet", 40, age=1)
    add(tmp_path / "Span" / "a.parquet", 100, age=2)
    add(tmp_path / "Span" / "a.parquet.reason", 10, age=2)
    add(tmp_path / "Endpoint" / "deltas-main-7.parquet", 100, age=3)
    add(tmp_path / "Span" / "b.parquet", 100, age=4)
    add(tmp_path / "Span" / "b.parquet.reason", 10, age=4)
    quarantine = Quarantine(tmp_path)
    everything = kept(tmp_path)
    assert quarantine.trim(400) == 0
    assert kept(tmp_path) == everything
    with caplog.at_level(logging.WARNING, "batchmill.spark"):
        assert quarantine.trim(250) == 200
    assert "the oldest 200 bytes were removed" in caplog.text
    last = {"Endpoint/deltas-main-7.parquet", "Span/b.parquet", "Span/b.parquet.reason"}
    assert kept(tmp_path) == last
    assert quarantine.trim(0) == 200
    assert kept(tmp_path) == set()


def test_a_reason_without_a_copy_stays(tmp_path: Path) -> None:
    """Its segment is still in the spool, and would be removed there. Nor is a batch disturbed."""
    add(tmp_path / "Span" / "c.parquet.reason", 10, age=1)
    add(tmp_path / ".main-7" / "Span" / "x.part", 10, age=1)
    assert Quarantine(tmp_path).trim(0) == 0
    assert kept(tmp_path) == {"Span/c.parquet.reason", ".main-7/Span/x.part"}
    assert Quarantine(tmp_path / "none").trim(0) == 0
