"""The page that Prometheus scrapes: the newest complete minute of a store, read once for many.

Values carry no timestamp. Prometheus takes a sample without one as of the moment of the scrape: the
series is marked stale as soon as it is gone from the page, and a value that late rows have changed
is simply the newer one. A sample with a timestamp of its own is refused where the series has it
already with another value, or is too far behind, and lingers for five minutes after it is gone. The
price is that a value shows up a minute or two later than it happened;
``batchmill_export_minute_timestamp_seconds`` says which minute it is. For values at their own time
there is remote write.
"""

from __future__ import annotations

import gzip
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from batchmill.errors import BatchmillError, ConfigError
from batchmill.export.minutes import complete_minute, end_s
from batchmill.export.prometheus.series import (
    NOT_A_NAME,
    OVER_LIMIT,
    OWN,
    Chosen,
    Family,
    Series,
    SeriesLimits,
    choose,
)
from batchmill.export.prometheus.text import TextFormat, render
from batchmill.store import Store

log = logging.getLogger("batchmill.export")

_EXPORT, _PIPELINE = OWN
_GZIP_LEVEL = 3
_COUNTED = {
    "rows": "Rows read, by source; Span is OpenTelemetry's.",
    "late": "Rows of minutes that were over when they came; they count all the same.",
    "quarantined": "Rows that did not fit, by reason; they are in the quarantine.",
    "expired": "Rows that came too late for the TTL.",
    "duplicates": "Rows delivered again, and counted once.",
    "unused": "Rows that no metric reads.",
    "unresolved": "Spans whose partner did not come in time, by reason.",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PageSettings:
    """What a page shows, and how often the store is asked."""

    limits: SeriesLimits = field(default_factory=SeriesLimits)
    max_age_s: float = 300.0
    """Values are left out once their minute is over for longer than this: a store that nobody
    writes to any more must not look alive. Five minutes is for how long Prometheus itself takes a
    sample for the present one."""
    recheck_s: float = 1.0
    """Within this time the store is not asked whether there is anything new."""
    refresh_s: float = 15.0
    """Within this time a minute is not read again, even where late rows may have changed it."""

    def __post_init__(self) -> None:
        for name in ("max_age_s", "recheck_s", "refresh_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(name, getattr(self, name), "a number of at least 0")


class StoreUnreadableError(BatchmillError, ConnectionError):
    """There is no page, because the store cannot be read; carries ``why``."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why

    def __str__(self) -> str:
        return f"the store cannot be read: {self.why}"


@dataclass(frozen=True, slots=True)
class _Read:
    """What was read of the store, and when."""

    mark: object
    minute: int | None
    at_s: float
    bodies: dict[tuple[TextFormat, bool], bytes]
    families: list[Family]


class MetricsPage:
    """Answers with the page; reads the store again only where there may be something new.

    Any number of threads may ask: one of them reads, and the others wait for it.
    """

    def __init__(
        self,
        open_store: Callable[[], Store],
        settings: PageSettings | None = None,
        *,
        clock: Callable[[], float] = time.time,
        own: Callable[[], list[Family]] = list,
    ) -> None:
        self._open_store = open_store
        self._settings = settings or PageSettings()
        self._clock = clock
        self._own = own
        self._lock = threading.Lock()
        self._store: Store | None = None
        self._read: _Read | None = None
        self._checked_s = 0.0
        self._failed: str | None = None
        self._said: frozenset[str] = frozenset()
        self.reads = 0
        """How often a minute was read."""

    def body(self, form: TextFormat, *, gzipped: bool, timeout_s: float) -> bytes:
        """The page; raises :class:`StoreUnreadableError`, also after ``timeout_s``."""
        if not self._lock.acquire(timeout=timeout_s):
            raise StoreUnreadableError("it is being read, and that takes long")
        try:
            read = self._current()
            found = read.bodies.get((form, gzipped))
            if found is None:
                text = render(read.families, form).encode("utf-8", "replace")
                found = gzip.compress(text, _GZIP_LEVEL, mtime=0) if gzipped else text
                read.bodies[form, gzipped] = found
            return found
        finally:
            self._lock.release()

    def close(self) -> None:
        """Let go of the store."""
        with self._lock:
            self._let_go()

    def _current(self) -> _Read:
        now_s = self._clock()
        if 0 <= now_s - self._checked_s < self._settings.recheck_s:
            if self._failed is not None:
                raise StoreUnreadableError(self._failed)
            if self._read is not None:
                return self._read
        try:
            self._read = self._look(now_s)
        except (BatchmillError, OSError) as error:
            self._let_go()
            self._failed = str(error)
            self._checked_s = self._clock()
            raise StoreUnreadableError(self._failed) from error
        self._failed = None
        self._checked_s = now_s
        return self._read

    def _look(self, now_s: float) -> _Read:
        """The page as it is to be now: as it was, if nothing can have changed."""
        if self._store is None:
            self._store = self._open_store()
        store, former = self._store, self._read
        minute = complete_minute(store.newest_minute(), now_s)
        mark = [(each.name, each.epoch, each.committed_at) for each in store.streams()]
        if former is not None and former.minute == minute:
            age_s = now_s - former.at_s
            # The page also tells how old the minute is and what was scraped: not for ever as it is.
            good_s = self._settings.refresh_s if former.mark != mark else 60.0
            if 0 <= age_s < good_s:
                return former
        self.reads += 1
        families = self._families(store, minute, now_s)
        return _Read(mark, minute, now_s, {}, families)

    def _families(self, store: Store, minute: int | None, now_s: float) -> list[Family]:
        limits = self._settings.limits
        chosen = Chosen()
        stale = minute is None or now_s - end_s(minute) > self._settings.max_age_s
        if minute is not None and not stale:
            values = store.bucket_values(minute, most=limits.max_series_per_metric)
            chosen = choose(values, limits)
            self._say(chosen.dropped)
        own = [*export_families(chosen, minute, stale), *counter_families(store.counters())]
        return sorted([*chosen.families, *own, *self._own()], key=lambda each: each.name)

    def _say(self, dropped: Mapping[str, int]) -> None:
        """Log what is over the limit, when it begins and when other metrics are."""
        if dropped and self._said != dropped.keys():
            log.warning(OVER_LIMIT, sum(dropped.values()), ", ".join(dropped))
        self._said = frozenset(dropped)

    def _let_go(self) -> None:
        if self._store is not None:
            self._store.close()
        self._store = None


def export_families(chosen: Chosen, minute: int | None, stale: bool) -> list[Family]:
    """What the page says about itself."""
    found = [
        Family(
            f"{_EXPORT}series",
            "gauge",
            "Series of metrics on this page.",
            [Series((), chosen.series)],
        ),
        Family(
            f"{_EXPORT}series_dropped",
            "gauge",
            "Series of this minute left out, over the limit; an entity not read counts as one.",
            [Series((("metric", name),), count) for name, count in chosen.dropped.items()],
        ),
        Family(
            f"{_EXPORT}stale",
            "gauge",
            "1: values are left out, as the newest complete minute is too old, or there is none.",
            [Series((), int(stale))],
        ),
    ]
    if minute is not None:
        found.append(
            Family(
                f"{_EXPORT}minute_timestamp_seconds",
                "gauge",
                "The end of the minute that this page is about.",
                [Series((), int(end_s(minute)))],
            )
        )
    return found


def counter_families(counters: Mapping[tuple[str, str, str], int]) -> list[Family]:
    """What the store has counted: rows, late ones, quarantined ones and so on."""
    by_name: dict[str, list[Series]] = {}
    texts: dict[str, str] = {}
    for (what, source, reason), count in sorted(counters.items()):
        name = f"{_PIPELINE}{NOT_A_NAME.sub('_', what)}_total"
        by_name.setdefault(name, []).append(Series((("source", source), ("reason", reason)), count))
        texts.setdefault(name, _COUNTED.get(what, f"What the pipeline counted as {what}."))
    return [Family(name, "counter", texts[name], found) for name, found in by_name.items()]
