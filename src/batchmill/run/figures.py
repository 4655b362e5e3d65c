"""What there is to see of a run: what its processes tell, and what the store has."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from batchmill.errors import BatchmillError
from batchmill.run.home import Home, read_json
from batchmill.sources import Grain
from batchmill.store import RetryPolicy, Store, StoreMissingError, TopRecord, Value, open_store

READ_S = 1.0
STATEMENTS = "top_n_database_statement"
SHOWN_STATEMENTS = 5
SPAN = "Span"
_PATIENCE = RetryPolicy(give_up_after_s=1.0)
_P99 = re.compile(r"\D*99\D*")


@dataclass(frozen=True)
class ServiceRow:
    """A service in one minute; None: nothing known."""

    name: str
    cpm: int
    average_ms: int | None = None
    p99_ms: int | None = None
    success: float | None = None
    """From 0 to 1, as apdex."""
    apdex: float | None = None


@dataclass(frozen=True)
class Tables:
    """What the store has on the newest minute, and the slowest statements of its hour."""

    minute: int | None = None
    services: tuple[ServiceRow, ...] = ()
    statements: tuple[TopRecord, ...] = ()


@dataclass(frozen=True)
class Counted:
    """What the pipeline has committed of spans, since ever."""

    spans: int = 0
    duplicates: int = 0
    quarantined: int = 0

    def since(self, before: Counted) -> Counted:
        """The difference."""
        return Counted(
            self.spans - before.spans,
            self.duplicates - before.duplicates,
            self.quarantined - before.quarantined,
        )


@dataclass(frozen=True)
class Waiting:
    """The complete segments in the spool; or the messages in a topic that no commit has."""

    segments: int = 0
    bytes: int = 0
    """0 for a topic, which does not tell."""
    oldest_s: float = 0.0
    topic: str = ""
    """The topic's address; empty: it is the spool."""
    told_s: float | None = 0.0
    """How long ago that was known; None: nobody has told yet."""

    @property
    def text(self) -> str:
        """For people."""
        if not self.topic:
            return f"{self.segments:,} segments"
        return "not known yet" if self.told_s is None else f"{self.segments:,} messages"


@dataclass(frozen=True)
class Picture:
    """A run at one moment."""

    now: float
    """Seconds since 1970."""
    processes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What the supervisor tells of each."""
    ingest: Mapping[str, Any] = field(default_factory=dict)
    """What ingest tells of itself; empty: nothing yet."""
    progress: Mapping[str, Any] = field(default_factory=dict)
    """What the pipeline tells of itself; empty: nothing yet."""
    waiting: Waiting = Waiting()
    tables: Tables = Tables()
    exports: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What each exporter tells of itself, by its name as a process."""
    web: Mapping[str, Any] = field(default_factory=dict)
    """What the server of the pages tells of itself; empty: there is none."""


def waiting_in(spool: Path) -> Waiting:
    """What is in a spool."""
    from batchmill.spool import unread

    found = unread(spool)
    return Waiting(found.segments, found.bytes, found.oldest_s)


def waiting_of(progress: Mapping[str, Any], now: float) -> Waiting | None:
    """What waits in a topic, as the pipeline has told; None: it reads none.

    Nobody else asks the broker: who only looks on need not be able to log in there.
    """
    topic = str(progress.get("source", ""))
    if not topic.startswith("kafka://"):
        return None
    told_s = max(0.0, now - float(progress.get("written_at", 0.0)))
    count = int(progress.get("unread_segments", 0))
    # What waited then has waited since, as far as is known.
    oldest_s = float(progress.get("lag_s", 0.0)) + told_s if count else 0.0
    return Waiting(count, 0, oldest_s, topic, told_s)


def what_waits(home: Home, progress: Mapping[str, Any], now: float, topic: str = "") -> Waiting:
    """Between ingest and pipeline; ``topic``: it is known that there is one, though none told."""
    found = waiting_of(progress, now)
    if found is None:
        found = Waiting(topic=topic, told_s=None) if topic else waiting_in(home.spool)
    return found


def take_picture(
    home: Home, processes: Mapping[str, Mapping[str, Any]], tables: Tables, topic: str = ""
) -> Picture:
    """A run as its folder shows it now."""
    now, progress = time.time(), read_json(home.progress) or {}
    return Picture(
        now,
        processes,
        read_json(home.ingest) or {},
        progress,
        what_waits(home, progress, now, topic),
        tables,
        {
            name: read_json(home.export(name)) or {}
            for name in processes
            if name.startswith("export")
        },
        (read_json(home.web) or {}) if "web" in processes else {},
    )


def exported(now: float, told: Mapping[str, Any] | None) -> str:
    """What an exporter tells of itself, in one line; nothing, if it is none."""
    if not told:
        return ""
    waiting = told.get("waiting") or {}
    if "scrapes" in told:
        return f"{told['scrapes']:,} scrapes of {told.get('target')}"
    text = f"{told.get('sent_values', 0):,} values sent to {told.get('target')}"
    if files := waiting.get("files"):
        oldest_ms = waiting.get("oldest_ms") or now * 1000
        text += f"; {files:,} files wait, the oldest {max(0.0, now - oldest_ms / 1000):.0f} s"
    dropped = sum((told.get("dropped") or {}).values())
    text += f"; {dropped:,} dropped" if dropped else ""
    return text + (f"; failing: {told['failing']}" if told.get("failing") else "")


def read_counted(url: str) -> Counted:
    """What a store has counted; a store that is not there has counted nothing."""
    try:
        with open_store(url, create=False) as store:
            return counted_of(store.counters())
    except StoreMissingError:
        return Counted()


def counted_of(counters: Mapping[tuple[str, str, str], int]) -> Counted:
    """The counters of spans."""
    totals = {"rows": 0, "duplicates": 0, "quarantined": 0}
    for (what, source, _), n in counters.items():
        if source == SPAN and what in totals:
            totals[what] += n
    return Counted(totals["rows"], totals["duplicates"], totals["quarantined"])


def read_tables(store: Store) -> Tables:
    """The tables of the newest minute."""
    minute = store.newest_minute()
    if minute is None:
        return Tables()
    known = {each.name for each in store.metrics()}

    def values(metric: str) -> dict[str, Value]:
        if metric not in known:
            return {}
        found = store.values(metric, grain=Grain.MINUTE, start=minute, end=minute)
        return {each.entity_id: each for each in found}

    statements: list[TopRecord] = []
    if STATEMENTS in store.top_streams():
        statements = store.top(STATEMENTS, grain=Grain.HOUR, bucket=minute // 100, n=5)
        statements.sort(key=lambda each: (-each.latency, each.time_us))
    return Tables(
        minute,
        service_rows(
            values("service_cpm"),
            values("service_resp_time"),
            values("service_percentile"),
            values("service_sla"),
            values("service_apdex"),
        ),
        tuple(statements[:SHOWN_STATEMENTS]),
    )


def service_rows(
    cpm: Mapping[str, Value],
    average: Mapping[str, Value],
    percentile: Mapping[str, Value],
    sla: Mapping[str, Value],
    apdex: Mapping[str, Value],
) -> tuple[ServiceRow, ...]:
    """A row for each service, the busiest first."""

    def number(found: Mapping[str, Value], entity: str) -> Any:
        value = found.get(entity)
        if value is None:
            return None
        if isinstance(value.value, dict):
            return next((n for label, n in value.value.items() if _P99.fullmatch(label)), None)
        return value.value

    def share(found: Mapping[str, Value], entity: str) -> float | None:
        value = number(found, entity)
        return None if value is None else value / 10_000

    rows = [
        ServiceRow(
            each.entity_name,
            int(number(cpm, entity)),
            number(average, entity),
            number(percentile, entity),
            share(sla, entity),
            share(apdex, entity),
        )
        for entity, each in cpm.items()
    ]
    return tuple(sorted(rows, key=lambda each: (-each.cpm, each.name)))


class TableReader(threading.Thread):
    """Reads the tables from a store once a second, beside whoever shows them."""

    def __init__(self, url: str) -> None:
        super().__init__(name="batchmill-tables", daemon=True)
        self.tables = Tables()
        self.fault = ""
        """Why the newest read failed; empty: it did not."""
        self._url = url
        self._end = threading.Event()

    def run(self) -> None:
        """Read until it is told to end; a store that is not there yet will come."""
        store: Store | None = None
        while not self._end.wait(READ_S):
            try:
                if store is None:
                    store = open_store(self._url, retry=_PATIENCE, create=False)
                self.tables = read_tables(store)
                self.fault = ""
            except StoreMissingError:
                continue
            except BatchmillError as error:
                self.fault = str(error)
        if store is not None:
            store.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self.join(5.0)
