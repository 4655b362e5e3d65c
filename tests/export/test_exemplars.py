"""Exemplars on the page for Prometheus: buckets of histograms name traces that are in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families

import batchmill
from batchmill.export import PageSettings, PrometheusServer, PrometheusSettings
from batchmill.export.prometheus import exemplars
from batchmill.export.prometheus.exemplars import LATENCY, STATEMENTS, exemplar_of
from batchmill.export.prometheus.page import MetricsPage
from batchmill.store import open_store
from batchmill.telemetry.exposition import TextFormat
from batchmill.testing import ManualClock
from batchmill.traces import SpanReader
from batchmill.workers import Statement
from tests.kit.servers.prometheus import parsed, running_prometheus
from tests.kit.threads import WAIT_S, until
from tests.kit.traces.segments import HOUR, kept, made_span

SCRIPT = "service_percentile_micros = from(Service.latencyMicros).percentileLog();"
MINUTE_S = 60
SPANS = [
    made_span(1, 1, at_ms=1_000, took_ms=3, name="GET /"),
    made_span(2, 1, at_ms=2_000, took_ms=4),
    made_span(3, 1, at_ms=3_000, took_ms=400),
    made_span(4, 1, at_ms=4_000, took_ms=20_000),
    made_span(5, 1, at_ms=61_000, took_ms=4),  # in the next minute
    made_span(6, 1, at_ms=5_000, took_ms=4, kind="CLIENT"),
    made_span(7, 1, at_ms=6_000, took_ms=4, service="unknown to the store"),
]
LONG = "x" * 121
STATEMENTS_OF = [("a" * 32, "b" * 16, 300), ("c" * 32, "", 400), ("", "", 900), (LONG, "", 450)]


def write_store(url: str, at_s: float, names: Sequence[str] = ("shop",)) -> None:
    """Calls of services that took 3, 4, 400 and 20,000 ms, slow statements, and a next minute."""
    at = datetime.fromtimestamp(at_s, UTC)
    with batchmill.Embedded(oal=SCRIPT, store=url, ttl_days=3650) as mill:
        for name in names:
            for second, ms in ((0, 3), (0, 4), (0, 400), (0, 20_000), (MINUTE_S, 1)):
                row = {"name": name, "layer": "GENERAL", "latency": ms, "latencyMicros": ms * 1000}
                time = datetime.fromtimestamp(at_s + second, UTC)
                mill.emit({"time": time, "type": "HTTP", "status": True, **row}, "Service")
        for trace_id, span_id, ms in STATEMENTS_OF:
            slow = Statement(at, "shop", "orders-db", ms, "SELECT 1")
            mill.emit(replace(slow, trace_id=trace_id, span_id=span_id))
        mill.flush()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store, and kept spans of the same minute."""
    folder = tmp_path_factory.mktemp("exemplars")
    write_store(f"sqlite:///{folder}/store.db", HOUR)
    kept(folder, SPANS)
    return folder


def page_of(folder: Path, traces: Path | None) -> MetricsPage:
    """The page a moment after the minute."""
    return MetricsPage(
        lambda: open_store(f"sqlite:///{folder}/store.db", create=False),
        clock=ManualClock(HOUR + MINUTE_S + 5).now,
        spans=None if traces is None else SpanReader(traces),
    )


@pytest.fixture
def page(folder: Path) -> Iterator[MetricsPage]:
    """The page of both."""
    page = page_of(folder, folder / "traces")
    yield page
    page.close()


def text(page: MetricsPage, form: TextFormat = TextFormat.OPENMETRICS) -> str:
    """The page as text."""
    return page.body(form, gzipped=False, timeout_s=WAIT_S).decode()


def buckets(page: MetricsPage, name: str) -> dict[str, tuple[float, Any]]:
    """Count and exemplar by upper bound, as the official client reads the page."""
    return {
        sample.labels["le"]: (sample.value, sample.exemplar)
        for family in open_families(text(page))  # type: ignore[no-untyped-call]
        for sample in family.samples
        if family.name == name
    }


def test_a_service_has_a_histogram_with_exemplars(page: MetricsPage) -> None:
    """Each bucket counts calls, and names the newest kept trace of that minute that is in it."""
    counted = buckets(page, LATENCY)
    counts = {bound: count for bound, (count, _) in counted.items()}
    assert [counts[bound] for bound in ("0.0025", "0.005", "0.25", "0.5", "10.0", "+Inf")] == [
        *(0, 2, 2, 3, 3, 4)
    ]
    named = {
        bound: (int(exemplar.labels["trace_id"], 16), exemplar.value, float(exemplar.timestamp))
        for bound, (_, exemplar) in counted.items()
        if exemplar is not None
    }
    assert named == {
        "0.005": (2, 0.004, HOUR + 2),
        "0.5": (3, 0.4, HOUR + 3),
        "+Inf": (4, 20.0, HOUR + 4),
    }


def test_slow_statements_have_exemplars(page: MetricsPage) -> None:
    """A statement names its trace; one whose id is missing or too long is counted only."""
    counted = buckets(page, STATEMENTS)
    assert counted["+Inf"] == (4, None)
    # Of two in one bucket at one moment, the greater id is shown.
    assert {b: (n, e.labels, e.value) for b, (n, e) in counted.items() if e is not None} == {
        "0.5": (3, {"trace_id": "c" * 32}, 0.4)
    }


def test_only_openmetrics_has_exemplars(page: MetricsPage) -> None:
    """In the plain format there are the same values, and no exemplar, which it does not know."""
    plain = text(page, TextFormat.PROMETHEUS)
    assert " # {" not in plain
    assert " # {" in text(page)
    opened = parsed(text(page), TextFormat.OPENMETRICS)
    assert {k: v for k, v in parsed(plain).items() if k[0].endswith("_bucket")} == {
        k: v for k, v in opened.items() if k[0].endswith("_bucket")
    }
    assert opened["batchmill_export_exemplars", frozenset()] == 4


def test_without_kept_spans_there_are_counts(folder: Path) -> None:
    """A service's histogram needs no kept spans; only its exemplars do."""
    page = page_of(folder, None)
    counted = buckets(page, LATENCY)
    page.close()
    assert {exemplar for _, exemplar in counted.values()} == {None}
    assert counted["+Inf"][0] == 4


def test_damaged_spans_do_not_take_the_page_away(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If kept spans cannot be read, the page has no exemplars of them, and the log says why."""
    keeper = kept(tmp_path, SPANS)
    (file,) = keeper.folder.glob("hour=*/*.parquet")
    whole = file.read_bytes()
    file.write_bytes(b"PAR1" + b"\xff" * 996 + whole[1000:])  # pages of rows, not the footer
    page = page_of(folder, keeper.folder)
    counted = buckets(page, LATENCY)
    page.close()
    assert counted["+Inf"] == (4, None)
    assert "cannot be read, and are left out" in caplog.text


@pytest.mark.parametrize(
    ("trace_id", "span_id", "labels"),
    [
        ("a" * 32, "b" * 16, {"trace_id": "a" * 32, "span_id": "b" * 16}),
        ("a" * 120, "", {"trace_id": "a" * 120}),
        ("a" * 100, "b" * 16, {"trace_id": "a" * 100}),
        ("a" * 121, "", None),
        ("", "b" * 16, None),
    ],
)
def test_an_exemplar_is_never_too_long(
    trace_id: str, span_id: str, labels: dict[str, str] | None
) -> None:
    """Its labels have 128 characters at most: the span id is left out first, then all of it."""
    exemplar = exemplar_of(trace_id, span_id, 1.0, 2.0)
    assert (None if exemplar is None else exemplar.labels) == labels


def test_services_over_the_limit_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the busiest services have a histogram; the page says how many were left out."""
    monkeypatch.setattr(exemplars, "MOST_SERVICES", 2)
    write_store(f"sqlite:///{tmp_path}/store.db", HOUR, ["a", "b", "c", "d", "e"])
    page = page_of(tmp_path, None)
    values = parsed(text(page, TextFormat.PROMETHEUS))
    page.close()
    shown = {dict(labels)["name"] for name, labels in values if name == f"{LATENCY}_bucket"}
    assert len(shown) == 2
    assert values["batchmill_export_series_dropped", frozenset({("metric", LATENCY)})] == 3


@pytest.mark.system
def test_a_real_prometheus_keeps_exemplars(tmp_path: Path) -> None:
    """Prometheus scrapes them with its default settings, and answers them for a bucket."""
    now_s = datetime.now(UTC).timestamp()
    at_s = now_s // MINUTE_S * MINUTE_S - MINUTE_S
    url = f"sqlite:///{tmp_path}/store.db"
    write_store(url, at_s)
    span = made_span(9, 1, at_ms=(at_s - HOUR) * 1000 + 7_000, took_ms=400)
    traces = kept(tmp_path, [span], now=now_s).folder
    settings = PrometheusSettings(port=0, page=PageSettings(recheck_s=0.0))
    with (
        PrometheusServer(lambda: open_store(url, create=False), settings, traces=traces) as server,
        running_prometheus(tmp_path / "prom", f"127.0.0.1:{server.port}") as prometheus,
    ):
        query = f'histogram_quantile(0.5, {LATENCY}_bucket{{name="shop"}})'
        until(lambda: prometheus.exemplars(query, at_s, at_s + 2 * MINUTE_S) != [])
        (answer,) = prometheus.exemplars(query, at_s, at_s + 2 * MINUTE_S)
        (exemplar,) = answer["exemplars"]
        assert answer["seriesLabels"]["le"] == "0.5"
        assert exemplar["labels"]["trace_id"] == f"{9:032x}"
        assert (float(exemplar["value"]), exemplar["timestamp"]) == (0.4, at_s + 7)
