"""Batches in, segments out: sharing one, being refused, the end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")

from batchmill.sources import UnknownNameError
from batchmill.spool import (
    Level,
    Overloaded,
    SpanBatch,
    Spool,
    SpoolClosedError,
    SpoolSettings,
    unread,
)
from tests.kit.events import HeldDisk, numbers_in, segments, spans
from tests.kit.threads import WAIT_S, until


def results(futures: list[Future[Path]]) -> set[Path]:
    """The segments of batches that must all be written."""
    return {future.result(WAIT_S) for future in futures}


def test_several_batches_share_a_segment(tmp_path: Path) -> None:
    """That is what makes an fsync before each answer affordable."""
    with Spool(tmp_path, linger_s=60) as spool:
        futures = [spool.submit("Span", spans([number])) for number in range(10)]
        assert spool.flush(WAIT_S)
        assert len(results(futures)) == 1
        assert numbers_in(segments(tmp_path)) == list(range(10))


@pytest.mark.parametrize("limit", [{"max_rows": 6}, {"max_bytes": 600}])
def test_enough_rows_or_bytes_make_a_segment(tmp_path: Path, limit: dict[str, Any]) -> None:
    """Then nobody lingers, and no segment is larger: a batch stays whole."""
    with Spool(tmp_path, linger_s=60, **limit) as spool:
        futures = [spool.submit("Span", spans(range(n, n + 4))) for n in (0, 4, 8)]
        first = futures[0].result(WAIT_S)
        assert numbers_in([first]) == [0, 1, 2, 3]
        assert spool.flush(WAIT_S)
        assert len(results(futures)) == 3


def test_a_batch_larger_than_a_segment_goes_alone(tmp_path: Path) -> None:
    """It is not split: its sender gets one answer."""
    with Spool(tmp_path, linger_s=60, max_rows=5) as spool:
        path = spool.submit("Span", spans(range(12))).result(WAIT_S)
    assert numbers_in([path]) == list(range(12))


def test_an_empty_batch_is_answered_at_once(tmp_path: Path) -> None:
    """There is nothing to be made safe."""
    with Spool(tmp_path, linger_s=60) as spool:
        assert spool.submit("Span", SpanBatch()).done()
    assert segments(tmp_path) == []


@pytest.mark.parametrize("name", ["../Span", "/etc", "Nope", "", "span", ".hidden"])
def test_only_names_of_the_catalog_become_folders(tmp_path: Path, name: str) -> None:
    """A path from outside gets nowhere."""
    with Spool(tmp_path / "spool") as spool, pytest.raises(UnknownNameError):
        spool.submit(name, [{"time": 1}])
    assert [path.name for path in tmp_path.rglob("*")] == ["spool"]


def test_spans_are_no_rows_and_rows_no_spans(tmp_path: Path) -> None:
    """Said at once, not by a segment that nobody can read."""
    with Spool(tmp_path) as spool:
        with pytest.raises(TypeError, match="SpanBatch"):
            spool.submit("Span", [{"time": 1}])
        with pytest.raises(TypeError, match="SpanBatch"):
            spool.submit("Endpoint", spans([1]))
        with pytest.raises(ValueError, match="one length"):
            spool.submit("Span", spans([1], name=["a", "b"]))
        assert spool.stats().submitted_rows == 0


def test_a_future_cannot_be_cancelled(tmp_path: Path) -> None:
    """What was taken is written, and counted as such."""
    with Spool(tmp_path, linger_s=60) as spool:
        future = spool.submit("Span", spans([1]))
        assert not future.cancel()
    assert numbers_in([future.result(WAIT_S)]) == [1]


@pytest.fixture
def held() -> Iterator[HeldDisk]:
    """A disk on which nothing gets written until its gate is opened."""
    disk = HeldDisk()
    yield disk
    disk.gate.open()


@pytest.mark.parametrize("limit", [{"capacity_rows": 10}, {"capacity_bytes": 1460}])
def test_too_much_that_waits_is_refused(
    tmp_path: Path, held: HeldDisk, limit: dict[str, Any]
) -> None:
    """What is being written counts too; once it is written, there is room again."""
    with Spool(tmp_path, linger_s=0, disk=held, **limit) as spool:
        futures = [spool.submit("Span", spans(range(5)))]
        held.gate.wait_entered()
        assert spool.level() is Level.WARNING
        futures.append(spool.submit("Span", spans(range(5, 10))))
        assert spool.level() is Level.CRITICAL
        with pytest.raises(Overloaded, match="10 rows") as refused:
            spool.submit("Span", spans([10]))
        assert (refused.value.level, refused.value.retry_after_s) == (Level.CRITICAL, 1.0)
        stats = spool.stats()
        assert (stats.queue_rows, stats.refused_rows, stats.refused) == (10, 1, {Level.CRITICAL: 1})
        held.gate.open()
        results(futures)
        assert spool.level() is Level.NORMAL
        futures.append(spool.submit("Span", spans([10])))
    assert sorted(numbers_in(sorted(results(futures)))) == list(range(11))


def test_too_much_that_is_unread_is_refused(tmp_path: Path) -> None:
    """The pipeline's lag reaches the senders; when it has caught up, they may come again."""
    with Spool(
        tmp_path,
        linger_s=0,
        unread_warning=1,
        unread_critical=2,
        unread_critical_plus=1 << 40,
    ) as spool:
        path = spool.submit("Span", spans([1])).result(WAIT_S)
        assert spool.level() is Level.CRITICAL
        with pytest.raises(Overloaded, match="the pipeline is behind"):
            spool.submit("Span", spans([2]))
        assert unread(tmp_path).segments == 1
        path.unlink()
        until(lambda: spool.level() is Level.NORMAL, "the level falls")
        spool.submit("Span", spans([2])).result(WAIT_S)
    assert numbers_in(segments(tmp_path)) == [2]


def test_the_bytes_that_are_unread_are_bounded(tmp_path: Path) -> None:
    """With one segment more at most: the level is known before a request is taken."""
    limit = 100_000
    settings = SpoolSettings(
        linger_s=0, unread_warning=limit, unread_critical=limit, unread_critical_plus=limit
    )
    sizes = [0]
    with Spool(tmp_path, settings) as spool:
        with contextlib.suppress(Overloaded):
            while len(sizes) < 1000:
                path = spool.submit("Span", spans(range(50))).result(WAIT_S)
                sizes.append(path.stat().st_size)
        with pytest.raises(Overloaded, match="the pipeline is behind"):
            spool.submit("Span", spans([1]))
    assert limit <= unread(tmp_path).bytes == sum(sizes) <= limit + max(sizes)


def test_a_disk_with_little_room_left_is_critical(tmp_path: Path) -> None:
    """The pipeline needs some to catch up."""
    with Spool(tmp_path, min_free_bytes=1 << 60) as spool:
        assert spool.level() is Level.CRITICAL
        with pytest.raises(Overloaded, match="must stay free"):
            spool.submit("Span", spans([1]))
        assert "must stay free" in spool.pressure().why


def test_close_writes_what_waits(tmp_path: Path) -> None:
    """All of it, of each type, without lingering."""
    spool = Spool(tmp_path, linger_s=60)
    futures = [
        spool.submit("Span", spans([1])),
        spool.submit("Endpoint", [{"time": 1, "name": "GET /", "serviceName": "shop"}]),
    ]
    assert spool.close()
    assert {path.parent.name for path in results(futures)} == {"Span", "Endpoint"}
    stats = spool.stats()
    assert (stats.submitted_rows, stats.written_rows, stats.queue_rows) == (2, 2, 0)


def test_close_that_runs_out_of_time_fails_the_rest(tmp_path: Path, held: HeldDisk) -> None:
    """Every future is answered: with a path, or with why not."""
    spool = Spool(tmp_path, linger_s=0, writers=1, disk=held)
    writing = spool.submit("Span", spans([1]))
    held.gate.wait_entered()
    waiting = spool.submit("Span", spans([2]))
    assert not spool.close(timeout=0)
    assert isinstance(waiting.exception(WAIT_S), SpoolClosedError)
    held.gate.open()
    assert numbers_in([writing.result(WAIT_S)]) == [1]
    stats = spool.stats()
    assert (stats.written_rows, stats.failed_rows, stats.queue_rows) == (1, 1, 0)


def test_a_closed_spool_takes_nothing(tmp_path: Path) -> None:
    """And says so, be it for a type that was never used."""
    spool = Spool(tmp_path, linger_s=0)
    spool.submit("Span", spans([1])).result(WAIT_S)
    assert spool.close()
    assert spool.close()
    for source, batch in (("Span", spans([2])), ("Endpoint", [{"time": 1}])):
        with pytest.raises(SpoolClosedError, match="open a new one"):
            spool.submit(source, batch)
    assert "closed" in repr(spool)


def test_settings_may_come_as_one(tmp_path: Path) -> None:
    """With changes on top; a name that is none is refused."""
    settings = SpoolSettings(linger_s=5)
    with Spool(tmp_path, settings, max_rows=7) as spool:
        assert (spool.settings.linger_s, spool.settings.max_rows) == (5, 7)
    with pytest.raises(TypeError, match="lingers"):
        Spool(tmp_path, lingers=3)


def test_what_is_worth_a_segment_need_not_linger(tmp_path: Path) -> None:
    """When somebody knows that nobody else is coming; less than that waits on."""
    with Spool(tmp_path, linger_s=600, hurry_rows=3) as spool:
        assert not spool.hurry()
        first = spool.submit("Span", spans([1, 2]))
        assert not spool.hurry()
        second = spool.submit("Span", spans([3]))
        assert spool.hurry()
        assert first.result(WAIT_S) == second.result(WAIT_S)
        third = spool.submit("Span", spans([4]))
        assert not spool.hurry()
        assert not third.done()
        assert spool.hurry(alone=True)
        assert third.result(WAIT_S) != first.result(WAIT_S)
