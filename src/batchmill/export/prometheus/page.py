"""The page that Prometheus scrapes: the newest complete minute of a store, read once for many.

Values carry no timestamp, so Prometheus takes a sample as of the moment of the scrape: the series
is marked stale as soon as it is gone from the page, and a value that late rows have changed is
simply the newer one. A sample with a timestamp of its own is refused if the series has another
value at that time or is too far ahead, and is shown for five minutes after it is gone. The price is
that a value shows up a minute or two later than it happened;
``batchmill_export_minute_timestamp_seconds`` says which minute it is. Remote write sends values at
their own time.
"""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from batchmill.errors import BatchmillError, check_numbers
from batchmill.export.prometheus.exemplars import HistogramReader, Histograms
from batchmill.export.prometheus.series import (
    NOT_A_NAME,
    RESERVED,
    DroppedSeriesLog,
    Family,
    SeriesLimits,
    SeriesSelection,
    complete_minute,
    end_s,
    select_series,
)
from batchmill.store import Store
from batchmill.telemetry.exposition import TextFormat, open_ended, render, render_telemetry

if TYPE_CHECKING:
    from batchmill.traces import SpanReader

_EXPORT, _PIPELINE = RESERVED
_GZIP_LEVEL = 3
_UNCHANGED_S = 60.0
"""How long a page is served while nothing is committed: it also says how old the minute is."""
_COUNTER_HELP = {
    "rows": "Rows read, by source; Span is OpenTelemetry's.",
    "late": "Rows of minutes that were over when they came; they count all the same.",
    "quarantined": "Rows that did not fit, by reason; they are in the quarantine.",
    "expired": "Rows that came too late for the TTL.",
    "doubtful": "Rows that were counted, though a clock must be wrong, by reason.",
    "overflow": "Rows of too many new entities, counted under overflow.",
    "overflow labels": "Counts of too many labels, moved to the label overflow.",
    "duplicates": "Rows delivered again, and counted once.",
    "unused": "Rows that no metric reads.",
    "unresolved": "Spans whose partner did not come in time, by reason.",
}


class StoreUnreadableError(BatchmillError, ConnectionError):
    """There is no page for Prometheus, because the store cannot be read."""

    why: str
    template = "the store cannot be read: {why}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PageSettings:
    """What a page shows, and how often the store is read."""

    limits: SeriesLimits = field(default_factory=SeriesLimits)
    max_age_s: float = 300.0
    """Values are left out once their minute is over for longer than this: a store that nobody
    writes to any more must not look alive. Prometheus itself uses a sample for five minutes."""
    recheck_s: float = 1.0
    """Within this time the store is not asked whether there is anything new."""
    refresh_s: float = 15.0
    """Within this time a minute is not read again, even where late rows may have changed it."""

    def __post_init__(self) -> None:
        check_numbers(self, 0, "max_age_s", "recheck_s", "refresh_s")


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """What was read from the store, and when."""

    commits: object
    """The last commit of each stream: the store has changed if this has."""
    minute: int | None
    read_s: float
    metrics: list[Metric]
    bodies: dict[tuple[TextFormat, bool], bytes] = field(default_factory=dict)
    """The pages made of it so far, by format and whether they are gzipped."""


class TelemetryPage:
    """Makes a page of the components of this process: queues, batchers, thresholds, flows."""

    def body(self, text_format: TextFormat, *, gzipped: bool, timeout_s: float) -> bytes:
        """The page, of this moment; it waits for nothing."""
        body = render_telemetry(text_format)
        return gzip.compress(body, _GZIP_LEVEL, mtime=0) if gzipped else body

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


class MetricsPage:
    """Makes the page; reads the store again only where there may be something new.

    Any number of threads may ask: one of them reads, and the others wait for it.
    """

    def __init__(
        self,
        open_store: Callable[[], Store],
        settings: PageSettings | None = None,
        *,
        clock: Callable[[], float] = time.time,
        server_metrics: Callable[[], list[Metric]] = list,
        spans: SpanReader | None = None,
    ) -> None:
        """``spans``: of the kept spans, for exemplars; None if there are none."""
        self._open_store = open_store
        self._settings = settings or PageSettings()
        self._clock = clock
        self._server_metrics = server_metrics
        self._histograms = HistogramReader(spans)
        self._telemetry = TelemetryPage()
        self._lock = threading.Lock()
        self._store: Store | None = None
        self._snapshot: _Snapshot | None = None
        self._checked_s = 0.0
        self._error: str | None = None
        self._dropped_log = DroppedSeriesLog()
        self.reads = 0
        """How often a minute was read."""

    def body(self, text_format: TextFormat, *, gzipped: bool, timeout_s: float) -> bytes:
        """The page; raises :class:`StoreUnreadableError`, also after ``timeout_s``."""
        if not self._lock.acquire(timeout=timeout_s):
            raise StoreUnreadableError("it is being read, and that takes long")
        try:
            snapshot = self._current()
            body = snapshot.bodies.get((text_format, gzipped))
            if body is None:
                body = open_ended(render(snapshot.metrics, text_format))
                if gzipped:
                    body = gzip.compress(body, _GZIP_LEVEL, mtime=0)
                snapshot.bodies[text_format, gzipped] = body
        finally:
            self._lock.release()
        # Of this moment, not of the minute that was read, so it is not kept with it. What is
        # gzipped in two parts is one text.
        return body + self._telemetry.body(text_format, gzipped=gzipped, timeout_s=timeout_s)

    def close(self) -> None:
        """Close the store."""
        with self._lock:
            self._close_store()

    def _current(self) -> _Snapshot:
        now_s = self._clock()
        if 0 <= now_s - self._checked_s < self._settings.recheck_s:
            if self._error is not None:
                raise StoreUnreadableError(self._error)
            if self._snapshot is not None:
                return self._snapshot
        try:
            self._snapshot = self._check(now_s)
        except (BatchmillError, OSError) as error:
            self._close_store()
            self._error = str(error)
            self._checked_s = self._clock()
            raise StoreUnreadableError(self._error) from error
        self._error = None
        self._checked_s = now_s
        return self._snapshot

    def _check(self, now_s: float) -> _Snapshot:
        """A new snapshot, or the former one if nothing can have changed since."""
        if self._store is None:
            self._store = self._open_store()
        store, former = self._store, self._snapshot
        minute = complete_minute(store.newest_minute(), now_s)
        commits = [(stream.name, stream.epoch, stream.committed_ms) for stream in store.streams()]
        if former is not None and former.minute == minute:
            valid_s = _UNCHANGED_S if former.commits == commits else self._settings.refresh_s
            if 0 <= now_s - former.read_s < valid_s:
                return former
        self.reads += 1
        return _Snapshot(commits, minute, now_s, self._read(store, minute, now_s))

    def _read(self, store: Store, minute: int | None, now_s: float) -> list[Metric]:
        """All metrics of the page, by name."""
        limits = self._settings.limits
        selection, histograms = SeriesSelection(), Histograms()
        stale = minute is None or now_s - end_s(minute) > self._settings.max_age_s
        if minute is not None and not stale:
            values = store.bucket_values(minute, most=limits.max_series_per_metric)
            selection = select_series(values, limits)
            histograms = self._histograms.read(store, values)
            self._dropped_log.log(selection.dropped)
        metrics = [
            *(_gauge(family) for family in selection.families),
            *histograms.metrics,
            *_page_metrics(selection, histograms, minute, stale),
            *_counters(store.counters()),
            *self._server_metrics(),
        ]
        # A counter's name has lost its ending here, and gets it back on the page.
        return sorted((metric for metric in metrics if metric.samples), key=_sample_name)

    def _close_store(self) -> None:
        if self._store is not None:
            self._store.close()
        self._store = None


def _sample_name(metric: Metric) -> str:
    return metric.samples[0].name


def _gauge(family: Family) -> Metric:
    gauge = GaugeMetricFamily(family.name, family.help, labels=family.label_names)
    for series in family.series:
        gauge.add_metric([value for _, value in series.labels], series.value)
    return gauge


def _page_metrics(
    selection: SeriesSelection, histograms: Histograms, minute: int | None, stale: bool
) -> list[Metric]:
    """What the page says about itself."""
    dropped = GaugeMetricFamily(
        f"{_EXPORT}series_dropped",
        "Series of this minute left out, over the limit; an entity not read counts as one.",
        labels=["metric"],
    )
    for name, count in (*selection.dropped.items(), *histograms.dropped.items()):
        dropped.add_metric([name], count)
    metrics: list[Metric] = [
        dropped,
        GaugeMetricFamily(
            f"{_EXPORT}series", "Series of metrics on this page.", value=selection.count
        ),
        GaugeMetricFamily(
            f"{_EXPORT}exemplars",
            "Exemplars on this page in the format OpenMetrics; others have none.",
            value=histograms.exemplars,
        ),
        GaugeMetricFamily(
            f"{_EXPORT}stale",
            "1: values are left out, as the newest complete minute is too old, or there is none.",
            value=int(stale),
        ),
    ]
    if minute is not None:
        metrics.append(
            GaugeMetricFamily(
                f"{_EXPORT}minute_timestamp_seconds",
                "The end of the minute that this page is about.",
                value=int(end_s(minute)),
            )
        )
    return metrics


def _counters(counters: Mapping[tuple[str, str, str], int]) -> list[CounterMetricFamily]:
    """What the store has counted: rows, late ones, quarantined ones and so on."""
    families: dict[str, CounterMetricFamily] = {}
    for (what, source, reason), count in sorted(counters.items()):
        name = f"{_PIPELINE}{NOT_A_NAME.sub('_', what)}"
        if name not in families:
            text = _COUNTER_HELP.get(what, f"What the pipeline counted as {what}.")
            families[name] = CounterMetricFamily(name, text, labels=["source", "reason"])
        families[name].add_metric([source, reason], count)
    return list(families.values())
