"""The page for Prometheus: every value, the right minute, within its limits, read once for many."""

from __future__ import annotations

import gzip
import logging
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from batchmill import ConfigError
from batchmill.export import PageSettings, SeriesLimits, StoreUnreadableError
from batchmill.export.prometheus.page import MetricsPage
from batchmill.export.prometheus.series import complete_minute
from batchmill.store import RetryPolicy, Store, open_store
from batchmill.telemetry.exposition import TextFormat
from batchmill.testing import ManualClock
from tests.kit.queues import make_queue
from tests.kit.servers.prometheus import after, expected, metrics_of, parsed, texts_of
from tests.kit.stores import MINUTE, Backend, Measurement, Writer
from tests.kit.threads import WAIT_S

NEXT = MINUTE + 1
ODD = ["plain", 'say "hi"', "back\\slash", "two\nlines", "naïve 名前 \U0001f41f", "a,b={c}", " "]
ROWS = [
    Measurement(latency, name, minute, entity)
    for minute in (MINUTE, NEXT)
    for number, entity in enumerate(ODD)
    for latency, name in ((10 + number, "GET"), (990, 'PO"ST\\'), (55, "line\nend"))
]


def page_of(store: Store, minute: int = MINUTE, **settings: Any) -> MetricsPage:
    """The page of a store, five seconds after a minute is over."""
    # Closing a page closes its store; these tests have fixtures that do so again, which is fine.
    return MetricsPage(
        lambda: store, PageSettings(**settings), clock=ManualClock(after(minute, 5)).now
    )


def text(page: MetricsPage, form: TextFormat = TextFormat.PROMETHEUS) -> str:
    """The page, unpacked."""
    return page.body(form, gzipped=False, timeout_s=WAIT_S).decode()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """An empty store."""
    with open_store(f"sqlite:///{tmp_path}/store.db") as opened:
        yield opened


@pytest.mark.parametrize("form", TextFormat)
def test_every_value_is_the_stores(backend: Backend, form: TextFormat) -> None:
    """The official client's parser reads every value of the minute, odd names and all."""
    store = backend.open()
    Writer(store).write(*ROWS)
    series = metrics_of(parsed(text(page_of(store), form), form))
    assert len(series) > 100
    assert series == expected(store, MINUTE)


def test_odd_names_come_back(store: Store) -> None:
    """Quotes, backslashes, line ends and letters of any script are read back as they were."""
    Writer(store).write(*ROWS)
    series = parsed(text(page_of(store)))
    names = {dict(labels)["name"] for name, labels in series if name == "batchmill_calls"}
    assert names == set(ODD)


def test_a_percentile_is_labelled_by_its_rank(store: Store) -> None:
    """Labelled metrics have a label more: p50 to p99 for percentiles."""
    Writer(store).write(*ROWS)
    series = parsed(text(page_of(store)))
    labels = {dict(labels)["label"] for name, labels in series if name == "batchmill_percentile"}
    assert labels == {"p50", "p75", "p90", "p95", "p99"}


def test_a_metric_is_described_by_its_definition(store: Store) -> None:
    """HELP is the metric's definition, TYPE says that it goes up and down."""
    Writer(store).write(*ROWS)
    lines = text(page_of(store)).splitlines()
    assert "# HELP batchmill_avg from(Endpoint.latency).longAvg(), of one minute" in lines
    assert "# TYPE batchmill_avg gauge" in lines


@pytest.mark.parametrize("form", TextFormat)
def test_a_definition_may_hold_anything(store: Store, form: TextFormat) -> None:
    """Quotes and backslashes of a definition are read back from HELP as they are."""
    script = r'calls = from(Endpoint.*).filter(name != "say \"hi\" \\ n").count();'
    Writer(store, script=script).write(*ROWS)
    (metric,) = store.metrics()
    texts = texts_of(text(page_of(store), form), form)
    assert texts["batchmill_calls"] == f"{metric.definition}, of one minute"
    assert r"say \"hi\" \\ n" in metric.definition


def test_the_minute_before_the_newest_is_shown(store: Store) -> None:
    """A minute is complete when its successor has begun; the page says which one it is."""
    writer = Writer(store)
    writer.write(Measurement(1, minute=MINUTE), Measurement(2, minute=NEXT))
    series = parsed(text(page_of(store)))
    assert metrics_of(series) == expected(store, MINUTE)
    assert series["batchmill_export_minute_timestamp_seconds", frozenset()] == after(MINUTE)


@pytest.mark.parametrize(
    ("newest", "now_s", "complete"),
    [
        (None, after(MINUTE), None),
        (NEXT, after(MINUTE, 1), MINUTE),
        (NEXT, after(MINUTE, 86_400), MINUTE),
        (NEXT + 10_000, after(MINUTE, 1), MINUTE),
        (202403010000, after(MINUTE), 202402292359),
    ],
    ids=["empty", "present", "quiet for a day", "a clock that is ahead", "end of February"],
)
def test_which_minute_is_complete(newest: int | None, now_s: float, complete: int | None) -> None:
    """The minute before the store's newest one, or before the present one if that is earlier."""
    assert complete_minute(newest, now_s) == complete


def test_an_empty_store_has_a_page(store: Store) -> None:
    """Where nothing has come in yet the page says so, and has no values."""
    series = parsed(text(page_of(store)))
    assert metrics_of(series) == {}
    assert series["batchmill_export_stale", frozenset()] == 1


def test_an_old_minute_is_not_shown_as_the_present(store: Store) -> None:
    """When nothing has been written for five minutes, values are left out, and it is said."""
    Writer(store).write(*ROWS)
    clock = ManualClock(after(MINUTE, 299))
    page = MetricsPage(lambda: store, clock=clock.now)
    assert metrics_of(parsed(text(page))) != {}
    clock.advance(61)
    series = parsed(text(page))
    assert metrics_of(series) == {}
    assert series["batchmill_export_stale", frozenset()] == 1


def test_the_order_does_not_depend_on_who_came_first(tmp_path: Path) -> None:
    """The same values give the same page, byte for byte, whichever order they came in."""
    pages = []
    for number, rows in enumerate((ROWS, ROWS[::-1])):
        with open_store(f"sqlite:///{tmp_path}/{number}.db") as store:
            writer = Writer(store)
            for row in rows:
                writer.write(row)
            pages.append(text(page_of(store, max_age_s=1e9)))
    assert pages[0] == pages[1]


BUSY = [
    Measurement(5, f"name {number}", minute, f"e{number}")
    for minute in (MINUTE, NEXT)
    for number in range(10)
    for _ in range(1 + (number * 7) % 10)
]
"""Entities e0 to e9 with 1 to 10 rows each: e7 is the busiest, then e4."""


def test_the_busiest_entities_are_shown(store: Store) -> None:
    """Over the limit of a metric, the entities with the most rows are kept."""
    Writer(store).write(*BUSY)
    series = parsed(text(page_of(store, limits=SeriesLimits(max_series_per_metric=2))))
    calls = {
        dict(labels)["name"]: value
        for (name, labels), value in series.items()
        if name == "batchmill_calls"
    }
    assert calls == {"e7": 10, "e4": 9}


def test_what_is_left_out_is_said(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """Series over the limit are counted by metric on the page, entities not read included."""
    Writer(store).write(*BUSY)
    with caplog.at_level(logging.WARNING, "batchmill.export"):
        series = parsed(text(page_of(store, limits=SeriesLimits(max_series_per_metric=2))))
    dropped = {
        dict(labels)["metric"]: value
        for (name, labels), value in series.items()
        if name == "batchmill_export_series_dropped"
    }
    # Of the two entities that are read, percentiles have five series each: eight are too many.
    assert dropped.pop("percentile") == 8 + 8
    assert dropped == dict.fromkeys(("avg", "by_name", "calls", "quickest", "slowest"), 8.0) | {
        "statuses": 8.0
    }
    assert ["over the limit" in record.getMessage() for record in caplog.records] == [True]


def test_there_are_no_more_series_than_allowed(store: Store) -> None:
    """The limit of all series holds, and what is shown and left out is all that there is."""
    Writer(store).write(*BUSY)
    whole = metrics_of(parsed(text(page_of(store))))
    series = parsed(text(page_of(store, limits=SeriesLimits(max_series=31))))
    shown = metrics_of(series)
    dropped = sum(v for (name, _), v in series.items() if name == "batchmill_export_series_dropped")
    assert len(shown) == 31 == series["batchmill_export_series", frozenset()]
    assert len(shown) + dropped == len(whole)
    assert shown.items() <= whole.items()
    # An entity has eleven series: the three busiest have room, the third not for all.
    assert {dict(labels)["name"] for _, labels in shown} == {"e7", "e4", "e1"}


def test_limits_are_checked() -> None:
    """A limit that lets nothing through is an error, and not an empty page."""
    with pytest.raises(ConfigError, match="max_series=0"):
        SeriesLimits(max_series=0)


def test_counters_are_totals(store: Store) -> None:
    """What the store has counted is on the page, by source and reason."""
    counters = {
        ("rows", "Span", ""): 5,
        ("late", "Span", ""): 2,
        ("quarantined", "Span", 'no "id"'): 3,
        ("quarantined segment", "Span", "no footer"): 1,
    }
    Writer(store).write(*ROWS, counters=counters)
    page = page_of(store)
    for form in TextFormat:
        series = parsed(text(page, form), form)
        totals = {
            (name, dict(labels)["source"], dict(labels)["reason"]): value
            for (name, labels), value in series.items()
            if name.startswith("batchmill_pipeline_")
        }
        assert totals == {
            (f"batchmill_pipeline_{what.replace(' ', '_')}_total", source, reason): n
            for (what, source, reason), n in counters.items()
        }


def test_a_metric_cannot_take_a_name_of_ours(store: Store) -> None:
    """A metric that is called as one of the page's own figures has another name there."""
    script = "export_series = from(Endpoint.*).count(); queue_depth = from(Endpoint.*).count();"
    Writer(store, script=script).write(*ROWS)
    with make_queue("ours", consumer=lambda batch: None):
        series = parsed(text(page_of(store)))
    assert series["batchmill_queue_depth", frozenset({("queue", "ours")})] == 0
    assert sum(name == "batchmill_queue_depth_" for name, _ in series) == len(ODD)
    assert series["batchmill_export_series", frozenset()] == 2 * len(ODD)
    assert sum(name == "batchmill_export_series_" for name, _ in series) == len(ODD)


def test_many_scrapes_are_one_read(store: Store) -> None:
    """A page is read from the store once a minute, as long as nothing is committed."""
    Writer(store).write(*ROWS)
    clock = ManualClock(after(MINUTE))
    page = MetricsPage(lambda: store, clock=clock.now)
    bodies = set()
    for _ in range(50):
        bodies.add(text(page))
        clock.advance(1)
    assert (len(bodies), page.reads) == (1, 1)


def test_late_rows_show_up(store: Store) -> None:
    """Late rows change the page of the same minute, after ``refresh_s`` and not before."""
    writer = Writer(store)
    writer.write(*ROWS)
    clock = ManualClock(after(MINUTE))
    page = MetricsPage(lambda: store, PageSettings(refresh_s=15), clock=clock.now)
    before = text(page)
    writer.write(Measurement(777, entity="plain"))
    clock.advance(14)
    assert text(page) == before
    clock.advance(1)
    assert metrics_of(parsed(text(page))) == expected(store, MINUTE)
    assert text(page) != before


def test_the_next_minute_shows_at_once(store: Store) -> None:
    """When another minute has become complete, the next look at the store shows it."""
    writer = Writer(store)
    writer.write(*ROWS)
    clock = ManualClock(after(NEXT))
    page = MetricsPage(lambda: store, PageSettings(refresh_s=1000), clock=clock.now)
    text(page)
    writer.write(Measurement(1, minute=NEXT + 1))
    clock.advance(2)
    assert metrics_of(parsed(text(page))) == expected(store, NEXT)


def test_the_packed_page_is_the_same(store: Store) -> None:
    """With gzip, the same page comes packed."""
    Writer(store).write(*ROWS)
    page = page_of(store)
    packed = page.body(TextFormat.PROMETHEUS, gzipped=True, timeout_s=WAIT_S)
    assert gzip.decompress(packed).decode() == text(page)


def test_a_store_that_is_missing_is_said_until_it_is_there(tmp_path: Path) -> None:
    """Without a store there is no page but a reason; the store is looked for again."""
    url = f"sqlite:///{tmp_path}/store.db"
    clock = ManualClock(after(MINUTE))
    page = MetricsPage(lambda: open_store(url, create=False), clock=clock.now)
    with pytest.raises(StoreUnreadableError, match="there is no store at"):
        text(page)
    with open_store(url) as store:
        Writer(store).write(*ROWS)
        clock.advance(2)
        assert metrics_of(parsed(text(page))) == expected(store, MINUTE)
    page.close()


def test_a_store_that_breaks_is_opened_anew(tmp_path: Path) -> None:
    """After a fault the store is let go of, and opened again at the next look."""
    url = f"sqlite:///{tmp_path}/store.db"
    with open_store(url) as store:
        Writer(store).write(*ROWS)
    opened: list[Store] = []

    def reopen() -> Store:
        opened.append(open_store(url))
        return opened[-1]

    clock = ManualClock(after(MINUTE))
    page = MetricsPage(reopen, clock=clock.now)
    text(page)
    opened[0].close()
    clock.advance(2)
    with pytest.raises(StoreUnreadableError, match="closed"):
        text(page)
    clock.advance(2)
    text(page)
    page.close()
    assert len(opened) == 2


def test_a_page_reads_by_index_and_once_a_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many metrics a source has, its minute is one query, which does not scan the table."""
    url = f"sqlite:///{tmp_path}/store.db"
    with open_store(url) as store:
        Writer(store).write(*ROWS)
    said: list[str] = []
    connect: Callable[..., sqlite3.Connection] = sqlite3.connect

    def watched(*args: Any, **settings: Any) -> sqlite3.Connection:
        connection = connect(*args, **settings)
        connection.set_trace_callback(said.append)
        return connection

    monkeypatch.setattr(sqlite3, "connect", watched)
    page = MetricsPage(
        lambda: open_store(url, create=False, retry=RetryPolicy(give_up_after_s=1)),
        clock=ManualClock(after(MINUTE)).now,
    )
    text(page)
    page.close()
    reads = [message for message in said if "minute_Endpoint" in message]
    assert len(reads) == 1
    monkeypatch.undo()
    connection = sqlite3.connect(f"{tmp_path}/store.db")
    plan = [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {reads[0]}")]
    connection.close()
    assert any("SEARCH t USING PRIMARY KEY (bucket=?)" in step for step in plan), plan
    assert not any(step.startswith("SCAN") for step in plan), plan
