"""A client that aggregates: deltas in the spool, each event answered when its delta is durable."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("numpy")

import pyarrow.parquet as pq

from batchmill import Client, oal
from batchmill.aggregate import (
    ROW_COUNT,
    Aggregator,
    Deltas,
    EntityBook,
    SlowestStatements,
    Statement,
    TopNThresholds,
    from_arrow,
    is_deltas,
    statements_from_arrow,
)
from batchmill.client import EdgeSettings
from batchmill.errors import ConfigError
from batchmill.sources import UnknownNameError, service, source
from batchmill.spool import BadRowsError, Overloaded, Spool, SpoolClosedError, SpoolWriteError
from tests.kit.events import BrokenDisk, HeldDisk, segments
from tests.kit.files import ROOT
from tests.kit.processes import SOURCE, Child, Life, run_script
from tests.kit.threads import WAIT_S, until

NOON = datetime(2026, 11, 15, 12, tzinfo=UTC)
HOUR = EdgeSettings(period_s=3600)
"""Nothing is written before it is flushed."""


@source(entity=service("shop"))
@dataclass(frozen=True)
class EdgeSale:
    time: datetime
    shop: str
    cents: int
    weight: float = 0.5
    note: str | None = None


@source(entity=service("shop"))
@dataclass(frozen=True)
class EdgeVisit:
    shop: str
    seconds: int


SCRIPT = """
edge_cents = from(EdgeSale.cents).sum();
edge_weight = from(EdgeSale.weight).doubleAvg();
edge_top = from(EdgeSale.cents).max();
"""


def sale(n: int, *, minute: int = 0, shop: str = "a") -> EdgeSale:
    """A sale of so many cents."""
    return EdgeSale(NOON + timedelta(minutes=minute), shop, n)


def deltas(paths: Sequence[Path]) -> Deltas:
    """What segments of EdgeSale hold, merged."""
    metrics = oal.load(SCRIPT)
    aggregator = Aggregator(metrics.catalog.source("EdgeSale"), tuple(metrics))
    tables = [pq.read_table(path, partitioning=None) for path in paths]
    return aggregator.merge([from_arrow(table, aggregator.plan) for table in tables])


def counted(folder: Path) -> int:
    """How many events the deltas of a spool stand for."""
    return int(deltas(segments(folder)).rows.sum())


def sums(folder: Path) -> dict[tuple[int, str], int]:
    """Cents by minute and shop: all of them fit the lower half of a sum."""
    merged = deltas(segments(folder))
    metrics = oal.load(SCRIPT)
    plan = Aggregator(metrics.catalog.source("EdgeSale"), tuple(metrics)).plan
    lower = merged.totals[plan.cells["edge_cents"][1]].values.tolist()
    shops = merged.roles[0].to_pylist()
    return dict(zip(zip(merged.starts.tolist(), shops, strict=True), lower, strict=True))


def test_events_become_one_delta_for_each_entity_and_minute(tmp_path: Path) -> None:
    """In one segment of their type, whatever order they came in; every call is answered with it."""
    with Client(tmp_path, aggregate=SCRIPT, edge=HOUR) as client:
        answers = [client.emit(sale(n, minute=n % 2, shop="ab"[n % 3 == 0])) for n in range(60)]
        answers += client.emit_many(sale(n, minute=n % 2) for n in range(60, 100))
        assert not any(answer.done() for answer in answers)
        assert client.flush(WAIT_S)
        (path,) = segments(tmp_path)
        assert {answer.result(WAIT_S) for answer in answers} == {path}
        stats = client.stats()
        assert (stats.emitted, stats.written, stats.waiting) == (100, 100, 0)
    table = pq.read_table(path, partitioning=None)
    assert path.parent.name == "EdgeSale"
    assert is_deltas(table.schema)
    assert (table.num_rows, sum(table[ROW_COUNT].to_pylist())) == (4, 100)
    minute = int(NOON.timestamp()) // 60
    expected: dict[tuple[int, str], int] = {}
    for n in range(100):
        key = (minute + n % 2, "b" if n < 60 and n % 3 == 0 else "a")
        expected[key] = expected.get(key, 0) + n
    assert sums(tmp_path) == expected


def test_an_event_is_answered_once_its_delta_is_on_the_disk(tmp_path: Path) -> None:
    """Not before: the disk holds the segment back."""
    disk = HeldDisk()
    with Spool(tmp_path, disk=disk) as spool, Client(spool, aggregate=SCRIPT, edge=HOUR) as client:
        answer = client.emit(sale(1))
        assert not client.flush(0.05)
        disk.gate.wait_entered()
        assert not answer.done()
        disk.gate.open()
        assert client.flush(WAIT_S)
        assert answer.result(0).exists()


def test_a_period_that_is_over_is_written_without_a_flush(tmp_path: Path) -> None:
    """And so is the next one; an edge without events has no thread."""
    with Client(tmp_path, aggregate=SCRIPT, edge=EdgeSettings(period_s=0.02)) as client:
        first = client.emit(sale(1)).result(WAIT_S)
        second = client.emit(sale(2)).result(WAIT_S)
        assert first != second
    assert counted(tmp_path) == 2


@pytest.mark.parametrize(
    "edge",
    [
        EdgeSettings(period_s=3600, max_calls=9, chunk_rows=5),
        EdgeSettings(period_s=3600, max_bytes=1, chunk_rows=5),
    ],
)
def test_what_would_take_too_much_memory_is_written_early(
    tmp_path: Path, edge: EdgeSettings
) -> None:
    """Too many calls that wait for a segment, or too many bytes of deltas."""
    with Client(tmp_path, aggregate=SCRIPT, edge=edge) as client:
        answers = [client.emit(sale(n)) for n in range(10)]
        assert answers[0].result(WAIT_S).exists()
        assert client.emit(sale(10)).done() is False
    assert counted(tmp_path) == 11


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (EdgeSale(datetime.now(UTC) + timedelta(hours=2), "a", 1), "time too far ahead"),
        (EdgeSale(datetime(1969, 1, 1, tzinfo=UTC), "a", 1), "time before 1970"),
        (EdgeSale(NOON, "a", 1, weight=float("nan")), "weight: not a finite number"),
        (EdgeSale(NOON, "a", 2**70), "a value that does not fit"),
    ],
)
def test_an_event_that_no_metric_can_count_fails_alone(
    tmp_path: Path, bad: EdgeSale, reason: str
) -> None:
    """With a reason, and counted by it; calls beside it are written, its own call is not."""
    with Client(tmp_path, aggregate=SCRIPT, edge=HOUR) as client:
        good = client.emit(sale(1))
        refused = client.emit(bad)
        (many,) = client.emit_many([sale(5), bad, sale(6)])
        also_good = client.emit(sale(2))
        assert client.flush(WAIT_S)
        assert good.result(0) == also_good.result(0)
        for answer in (refused, many):
            assert isinstance(answer.exception(0), BadRowsError)
        stats = client.stats()
        assert (stats.written, stats.failed, stats.invalid) == (2, 4, {reason: 2})
    assert set(sums(tmp_path).values()) == {3}


def test_a_required_field_that_is_missing_is_refused_at_once(tmp_path: Path) -> None:
    """As by a client that does not aggregate."""
    with Client(tmp_path, aggregate=SCRIPT) as client:
        with pytest.raises(BadRowsError, match="cents is required"):
            client.emit({"time": NOON, "shop": "a", "weight": 1.0}, "EdgeSale")
        assert client.stats().emitted == 0


def test_events_that_no_metric_reads_are_written_as_they_are(tmp_path: Path) -> None:
    """In a segment of rows, beside the deltas of the others."""
    with Client(tmp_path, aggregate=SCRIPT, edge=HOUR) as client:
        client.emit_many([EdgeVisit("a", 5), sale(1)])
    kinds = {path.parent.name: is_deltas(pq.read_schema(path)) for path in segments(tmp_path)}
    assert kinds == {"EdgeVisit": False, "EdgeSale": True}


def test_a_client_that_gets_too_many_events_refuses_them(tmp_path: Path) -> None:
    """Those that are not deltas yet are bounded; when they are, there is room again."""
    edge = EdgeSettings(period_s=3600, capacity_rows=10)
    with Client(tmp_path, aggregate=SCRIPT, edge=edge, wait_s=0.01) as client:
        client.emit_many([sale(n) for n in range(10)])
        with pytest.raises(Overloaded, match="capacity_rows"):
            client.emit(sale(10))
        assert client.flush(WAIT_S)
        client.emit(sale(11))
        stats = client.stats()
        assert (stats.emitted, stats.refused) == (11, 1)
    assert counted(tmp_path) == 11


def test_a_spool_at_critical_refuses_events_and_takes_the_deltas_of_earlier_ones(
    tmp_path: Path,
) -> None:
    """They were accepted, so they are written."""
    with (
        Spool(tmp_path, unread_warning=1, unread_critical=1) as spool,
        Client(spool, aggregate=SCRIPT, edge=HOUR, wait_s=0.3) as client,
    ):
        early = client.emit(sale(1))
        assert client.flush(WAIT_S)
        assert early.result(0).exists()
        until(lambda: _is_refused(client, "not read yet"), "the level is looked at")
        assert client.flush(WAIT_S)
        assert client.stats().written == client.stats().emitted
    assert counted(tmp_path) == client.stats().written


def _is_refused(client: Client, why: str) -> bool:
    try:
        client.emit(sale(1))
    except Overloaded as error:
        return why in str(error)
    return False


def test_a_segment_that_cannot_be_written_fails_its_calls(tmp_path: Path) -> None:
    """Nothing of them is there, so they may be emitted again."""
    disk = BrokenDisk("sync", errno.ENOSPC)
    with (
        Spool(tmp_path, disk=disk, retry_after_s=0) as spool,
        Client(spool, aggregate=SCRIPT, edge=HOUR) as client,
    ):
        answer = client.emit(sale(1))
        assert client.flush(WAIT_S)
        assert isinstance(answer.exception(0), SpoolWriteError)
        assert (client.stats().failed, segments(tmp_path)) == (1, [])
        disk.step = None
        assert client.emit(sale(2)).done() is False
    assert set(sums(tmp_path).values()) == {2}


def test_after_close_events_are_refused(tmp_path: Path) -> None:
    """What was accepted before is written."""
    client = Client(tmp_path, aggregate=SCRIPT, edge=HOUR)
    answer = client.emit(sale(1))
    assert client.close()
    assert answer.result(0).exists()
    with pytest.raises(SpoolClosedError):
        client.emit(sale(2))
    assert client.flush(WAIT_S)


def test_a_spool_of_others_stays_open(tmp_path: Path) -> None:
    """The client hands over what it has."""
    with Spool(tmp_path) as spool:
        with Client(spool, aggregate=SCRIPT, edge=HOUR) as client:
            answer = client.emit(sale(1))
        assert answer.done()
        assert not spool.closed


def test_asyncio(tmp_path: Path) -> None:
    """aemit is back when the delta is durable; a cancelled task's event is written all the same."""

    async def main() -> set[Path]:
        async with Client(tmp_path, aggregate=SCRIPT, edge=EdgeSettings(period_s=0.05)) as client:
            cancelled = asyncio.create_task(client.aemit(sale(100)))
            await asyncio.sleep(0)
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            return set(await asyncio.gather(*(client.aemit(sale(n)) for n in range(100))))

    assert all(path.exists() for path in asyncio.run(main()))
    assert (counted(tmp_path), set(sums(tmp_path).values())) == (101, {5050})


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork()")
def test_a_forked_child_writes_its_own_events_only(tmp_path: Path) -> None:
    """What the parent had accepted, the parent writes, once."""
    with Client(tmp_path, aggregate=SCRIPT, edge=HOUR) as client:
        parents = client.emit(sale(1))

        def work() -> None:
            if client.stats().emitted:
                raise AssertionError(client.stats())
            own = client.emit(sale(10))
            if not client.flush(WAIT_S) or not own.result(0).exists():
                raise AssertionError("the child's event is not written")

        Child(work).succeeds()
        assert not parents.done()
        assert client.emit(sale(100)).done() is False
    assert (counted(tmp_path), set(sums(tmp_path).values())) == (3, {111})


SETUP = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from batchmill import Client
from batchmill.client import EdgeSettings
from tests.client.test_edge import SCRIPT, sale
"""


def test_a_client_that_was_never_closed_writes_at_exit(tmp_path: Path) -> None:
    """Whatever it has accepted."""
    script = f"""{SETUP}
client = Client({str(tmp_path)!r}, aggregate=SCRIPT, edge=EdgeSettings(period_s=3600))
for n in range(1000):
    client.emit(sale(n))
"""
    done = run_script(script)
    assert (done.returncode, done.stderr) == (0, "")
    assert (counted(tmp_path), set(sums(tmp_path).values())) == (1000, {499_500})


@pytest.mark.parametrize("answers", [1, 200])
def test_a_killed_client_loses_only_what_it_did_not_acknowledge(
    tmp_path: Path, answers: int
) -> None:
    """Every event has a minute of its own: those acknowledged are there, and none is there twice.

    What is there and not acknowledged was durable when the process died, before it could say so.
    """
    script = f"""{SETUP}
client = Client({str(tmp_path)!r}, aggregate=SCRIPT, edge=EdgeSettings(period_s=0.01))
n = 0
while True:
    n += 1
    client.emit(sale(1, minute=-n)).add_done_callback(
        lambda answer, n=n: answer.exception() or os.write(1, b"%d\\n" % n)
    )
"""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join((SOURCE, str(ROOT))))
    with Life([sys.executable, "-c", script], tmp_path / "log", environment) as life:
        life.must_hear(r"\d+", answers)
        life.kill()
    acknowledged = {int(line) for line in life.lines}
    noon = int(NOON.timestamp()) // 60
    merged = deltas(segments(tmp_path))
    there = dict(zip((noon - merged.starts).tolist(), merged.rows.tolist(), strict=True))
    assert len(acknowledged) >= answers
    assert acknowledged <= there.keys()
    assert set(there.values()) == {1}


def test_many_threads_emit_and_every_event_counts_once(tmp_path: Path) -> None:
    """While periods end and chunks fill."""
    edge = EdgeSettings(period_s=0.02, chunk_rows=64)
    answers: list[Future[Any]] = []
    with Client(tmp_path, aggregate=SCRIPT, edge=edge, wait_s=WAIT_S) as client:

        def emit(first: int) -> list[Future[Any]]:
            return [client.emit(sale(n)) for n in range(first, first + 1000)]

        with ThreadPoolExecutor(4) as pool:
            for some in pool.map(emit, range(0, 4000, 1000)):
                answers += some
        assert client.flush(WAIT_S)
        assert all(answer.done() for answer in answers)
    assert (counted(tmp_path), set(sums(tmp_path).values())) == (4000, {4000 * 3999 // 2})


def call(n: int, *, text: str = "SELECT 1", ahead: bool = False) -> Statement:
    """A call of a database that took so many milliseconds."""
    moment = datetime.now(UTC) + timedelta(hours=2) if ahead else NOON
    return Statement(moment, "shop", "orders", n, text, "mysql", trace_id=f"{n:032x}")


def statements(folder: Path) -> SlowestStatements:
    """What a spool has of statements, merged."""
    merged = SlowestStatements(50, TopNThresholds())
    for path in folder.glob("Statement/*.parquet"):
        table = pq.read_table(path, partitioning=None)
        merged.merge(statements_from_arrow(table, 50, TopNThresholds()))
    return merged


def test_statements_become_the_slowest_of_them_and_their_runs(tmp_path: Path) -> None:
    """Exactly those that one place would keep, though two periods wrote them."""
    calls = [call(n, text=f"SELECT {n} FROM {'ab'[n % 2]}") for n in range(150, 350)]
    with Client(tmp_path, aggregate=SCRIPT, edge=HOUR) as client:
        first = [client.emit(some) for some in calls[:100]]
        client.emit_many([*calls[100:150], sale(1)])
        assert client.flush(WAIT_S)
        (path,) = tmp_path.glob("Statement/*.parquet")
        assert {answer.result(0) for answer in first} == {path}
        client.emit_many(calls[150:])
    assert client.stats().written == 201
    assert sum(pq.read_table(path, partitioning=None)[ROW_COUNT].to_pylist()) == 150
    assert pq.read_table(path, partitioning=None).num_rows < 110
    expected = SlowestStatements(50, TopNThresholds())
    expected.add(calls)
    book = EntityBook()
    merged = statements(tmp_path)
    assert sorted(map(repr, merged.topn_rows(book))) == sorted(map(repr, expected.topn_rows(book)))
    assert merged.runs == expected.runs


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (call(300, ahead=True), "time too far ahead"),
        (call(300, text="\ud800"), "a value that does not fit"),
        (call(2**70), "a value that does not fit"),
        (Statement(NOON, "shop", None, 1, "SELECT 1"), "a value that does not fit"),  # type: ignore[arg-type]
    ],
)
def test_a_statement_that_cannot_be_counted_fails_alone(
    tmp_path: Path, bad: Statement, reason: str
) -> None:
    """The others are written, without those of its own call."""
    with Client(tmp_path, aggregate=SCRIPT, edge=HOUR) as client:
        good = client.emit(call(301))
        (answer,) = client.emit_many([call(302), bad])
        assert client.flush(WAIT_S)
        assert good.exception(0) is None
        assert isinstance(answer.exception(0), BadRowsError)
        stats = client.stats()
        assert (stats.written, stats.failed, stats.invalid) == (1, 2, {reason: 1})
    assert set(statements(tmp_path).runs.values()) == {(1, 301)}


def test_a_client_that_does_not_aggregate_takes_no_statements(tmp_path: Path) -> None:
    """There is no event type of that name."""
    with Client(tmp_path) as client, pytest.raises(UnknownNameError, match="Statement"):
        client.emit(call(1))


def test_settings_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    """With what is allowed."""
    with pytest.raises(ConfigError, match="no aggregate"):
        Client(tmp_path, edge=EdgeSettings())
    with pytest.raises(ConfigError, match="period_s"):
        EdgeSettings(period_s=-1)
    with pytest.raises(ConfigError, match="apdex_ms"):
        EdgeSettings(apdex_ms={"shop": 0})
