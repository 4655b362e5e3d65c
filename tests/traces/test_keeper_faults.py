"""What goes wrong with kept spans stays with them: segments are taken, counts are right."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchmill.traces import KeepSettings, SpanKeeper, SpanReader
from batchmill.traces.keeper import INVALID, NOT_WRITTEN, TOO_MUCH, TOO_OLD, UNREADABLE
from batchmill.traces.layout import CHANGE, INCOMING
from tests.kit.files import fill, small_disk
from tests.kit.traces.segments import NOW, kept, made_span, write_spans

MIB = 2**20


def _keeper(folder: Path, settings: KeepSettings | None = None, now: float = NOW) -> SpanKeeper:
    return SpanKeeper(folder, settings, clock=lambda: now)


def _waiting(keeper: SpanKeeper) -> list[Path]:
    return sorted((keeper.folder / INCOMING).glob("*.parquet"))


def _large(folder: Path, name: str, mebibytes: int, at_s: int) -> Path:
    """A segment of one span that takes so many MiB of the disk."""
    row = made_span(int(name), 1, at_ms=1, note=os.urandom(mebibytes * MIB).hex())
    path = write_spans(folder, name, [row])
    os.utime(path, (at_s, at_s))
    return path


def test_a_full_disk_takes_segments_out_of_the_spool(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They are removed and counted, so that the spool does not fill up; later ones are kept."""
    with small_disk(tmp_path / "disk") as disk:
        keeper = _keeper(disk / "traces")
        filler = fill(disk)
        segments = [
            write_spans(tmp_path, name, [made_span(trace, 1) for trace in range(500)])
            for name in ("a", "b")
        ]
        for segment in segments:
            keeper.take(segment)
        assert not any(segment.exists() for segment in segments)
        assert keeper.stats.dropped == {NOT_WRITTEN: 1000}
        assert len([line for line in caplog.messages if "cannot be kept" in line]) == 1
        assert list((keeper.folder / INCOMING).iterdir()) == []
        filler.unlink()
        keeper.take(write_spans(tmp_path, "c", [made_span(9, 1)]))
        keeper.tend(everything=True)
        assert SpanReader(keeper.folder).trace("9") is not None
        assert SpanReader(keeper.folder).stats().dropped == {NOT_WRITTEN: 1000}


def test_a_folder_that_is_gone_is_made_again(tmp_path: Path) -> None:
    """Somebody has removed it while the pipeline ran."""
    keeper = kept(tmp_path, [made_span(1, 1)])
    shutil.rmtree(keeper.folder)
    segment = write_spans(tmp_path, "a", [made_span(2, 1)])
    keeper.take(segment)
    assert not segment.exists()
    keeper.tend(everything=True)
    assert SpanReader(keeper.folder).trace("2") is not None
    with pytest.raises(FileNotFoundError):
        keeper.take(segment)


def test_a_disk_that_is_full_while_spans_are_sorted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing half written is left behind, and the next try counts nothing twice."""
    caplog.set_level(logging.WARNING)
    with small_disk(tmp_path / "disk") as disk:
        keeper = _keeper(disk / "traces")
        old = made_span(5000, 1, at_ms=-48 * 3_600_000)
        rows = [made_span(trace, 1, note=os.urandom(40).hex()) for trace in range(2000)]
        keeper.take(write_spans(tmp_path, "a", [*rows, *rows[:10], old]))
        filler = fill(disk)
        for _ in range(3):
            with pytest.raises(OSError, match="No space left"):
                keeper.tend(everything=True)
            assert list(keeper.folder.rglob(".*.part")) == []
            assert list(keeper.folder.rglob(".*.tmp")) == []
            assert list(keeper.folder.glob("hour=*")) == []
            assert (keeper.stats.duplicates, keeper.stats.dropped) == (0, {})
        filler.unlink()
        keeper.tend(everything=True)
        stats = keeper.stats
        assert (stats.spans, stats.duplicates, stats.dropped) == (2000, 10, {TOO_OLD: 1})


def test_a_change_that_cannot_be_finished_is_finished_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the same keeper, or one that starts on a full disk: each span is there once."""
    with small_disk(tmp_path / "disk") as disk:
        keeper = _keeper(disk / "traces")
        keeper.take(write_spans(tmp_path, "a", [made_span(1, 1), made_span(1, 1)]))

        def refuse(change: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as other:
            other.setattr(keeper, "_finish", refuse)
            with pytest.raises(OSError, match="No space left"):
                keeper.tend(everything=True)
        assert (keeper.folder / CHANGE).exists()
        filler = fill(disk)
        later = _keeper(keeper.folder)
        filler.unlink()
        later.take(write_spans(tmp_path, "b", [made_span(2, 1)]))
        later.tend(everything=True)
        assert (later.stats.spans, later.stats.duplicates, later.stats.dropped) == (2, 1, {})
        keeper.tend(everything=True)
        assert not (keeper.folder / CHANGE).exists()


def test_what_waits_is_bounded(tmp_path: Path) -> None:
    """A sorter that hangs: of what waits the newest stays, up to a quarter of the limit."""
    keeper = _keeper(tmp_path / "traces", KeepSettings(max_bytes=64 * MIB))
    with keeper._turn:
        keeper.start()
        for number in range(10):
            keeper.take(_large(tmp_path, str(number), 4, NOW + number))
        waiting = _waiting(keeper)
        assert [path.stem for path in waiting] == ["7", "8", "9"]
        assert sum(path.stat().st_size for path in waiting) <= 16 * MIB
        assert keeper.stats.dropped == {TOO_MUCH: 7}
    keeper.stop()
    keeper.tend(everything=True)
    stats = SpanReader(keeper.folder).stats()
    assert (stats.spans, stats.dropped) == (3, {TOO_MUCH: 7})


def test_without_a_thread_much_is_sorted_at_once(tmp_path: Path) -> None:
    """A run over what is there keeps all that fits."""
    keeper = _keeper(tmp_path / "traces", KeepSettings(max_bytes=64 * MIB))
    for number in range(10):
        keeper.take(_large(tmp_path, str(number), 4, NOW + number))
        assert sum(path.stat().st_size for path in _waiting(keeper)) <= 16 * MIB
    keeper.tend(everything=True)
    assert keeper.stats.spans == 10
    assert keeper.stats.dropped == {}


def test_a_span_with_a_time_that_no_calendar_has_is_invalid(tmp_path: Path) -> None:
    """It does not keep the others from being sorted."""
    bad = [made_span(1, 1) | {"time": time} for time in (-(2**62), -1, 2**62)]
    keeper = kept(tmp_path, [*bad, made_span(2, 1)])
    assert SpanReader(keeper.folder).trace("2") is not None
    assert (keeper.stats.spans, keeper.stats.dropped) == (1, {INVALID: 3})


@pytest.mark.parametrize("bad", ["empty", "cut", "foreign", "a folder"])
def test_a_damaged_segment_does_not_keep_others_waiting(tmp_path: Path, bad: str) -> None:
    """It is counted once; the good ones of its group are kept."""
    keeper = _keeper(tmp_path / "traces")
    good = write_spans(tmp_path, "good", [made_span(1, 1)])
    whole = good.read_bytes()
    keeper.take(good)
    path = keeper.folder / INCOMING / "bad.parquet"
    if bad == "a folder":
        path.mkdir()
    elif bad == "foreign":
        columns = {name: [1] for name in ("trace_id", "span_id", "time", "end_time", "kind")}
        pq.write_table(pa.table(columns), path)
    else:
        path.write_bytes(whole[: len(whole) // 2 if bad == "cut" else 0])
    for _ in range(2):
        keeper.tend(everything=True)
    assert (keeper.stats.spans, SpanReader(keeper.folder).trace("1") is not None) == (1, True)
    assert keeper.stats.dropped == ({} if bad == "a folder" else {UNREADABLE: 1})


@pytest.mark.parametrize("bad", ["empty", "cut", "foreign"])
def test_a_damaged_file_does_not_stop_merging_and_dropping(tmp_path: Path, bad: str) -> None:
    """It stays until its hour is dropped; the others of its hour are merged."""
    keeper = _keeper(tmp_path / "traces")
    for number in range(7):
        keeper.take(write_spans(tmp_path, str(number), [made_span(number, 1)]))
        keeper.tend(everything=True)
    first, *_ = files = sorted(keeper.folder.glob("hour=*/*.parquet"))
    whole = first.read_bytes()
    damaged = first.with_name("1-damaged.parquet")
    if bad == "foreign":
        pq.write_table(pa.table({"trace_id": [1], "x": [2]}), damaged)
    else:
        damaged.write_bytes(whole[: len(whole) // 2 if bad == "cut" else 0])
    assert len(files) == 7
    for _ in range(2):
        keeper.tend()
    assert len(list(keeper.folder.glob("hour=*/*.parquet"))) == 2
    _keeper(keeper.folder, now=NOW + 30 * 3600).tend()
    assert list(keeper.folder.glob("hour=*")) == []
