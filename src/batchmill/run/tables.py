"""What ``batchmill run`` shows of its store: services in the newest minute, slowest statements."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from batchmill.errors import BatchmillError
from batchmill.sources import Grain
from batchmill.store import RetryPolicy, Store, TopRecord, Value, open_store

READ_S = 1.0
STATEMENTS = "top_n_database_statement"
SHOWN_STATEMENTS = 5
_PATIENCE = RetryPolicy(give_up_after_s=1.0)
_P99 = re.compile(r"\D*99\D*")


@dataclass(frozen=True)
class ServiceRow:
    """A service in one minute; None: the store has no such value."""

    name: str
    cpm: int
    average_ms: int | None = None
    p99_ms: int | None = None
    success: float | None = None
    """From 0 to 1, like apdex."""
    apdex: float | None = None


@dataclass(frozen=True)
class Tables:
    """The services in the newest minute, and the slowest statements of its hour."""

    minute: int | None = None
    services: tuple[ServiceRow, ...] = ()
    statements: tuple[TopRecord, ...] = ()


def read_tables(store: Store) -> Tables:
    """The tables of the newest minute in a store."""
    minute = store.newest_minute()
    if minute is None:
        return Tables()
    known = {metric.name for metric in store.metrics()}

    def values(metric: str) -> dict[str, Value]:
        if metric not in known:
            return {}
        found = store.values(metric, grain=Grain.MINUTE, start=minute, end=minute)
        return {value.entity_id: value for value in found}

    statements: list[TopRecord] = []
    if STATEMENTS in store.top_streams():
        statements = store.top(STATEMENTS, grain=Grain.HOUR, bucket=minute // 100, n=5)
        statements.sort(key=lambda record: (-record.latency, record.time_us))
    services = service_rows(
        values("service_cpm"),
        values("service_resp_time"),
        values("service_percentile"),
        values("service_sla"),
        values("service_apdex"),
    )
    return Tables(minute, services, tuple(statements[:SHOWN_STATEMENTS]))


def service_rows(
    cpm: Mapping[str, Value],
    average: Mapping[str, Value],
    percentile: Mapping[str, Value],
    sla: Mapping[str, Value],
    apdex: Mapping[str, Value],
) -> tuple[ServiceRow, ...]:
    """A row for each service, the busiest first."""

    def number(values: Mapping[str, Value], entity: str) -> Any:
        value = values.get(entity)
        if value is None:
            return None
        if isinstance(value.value, dict):
            return next((n for label, n in value.value.items() if _P99.fullmatch(label)), None)
        return value.value

    def share(values: Mapping[str, Value], entity: str) -> float | None:
        value = number(values, entity)
        return None if value is None else value / 10_000

    rows = [
        ServiceRow(
            value.entity_name,
            int(number(cpm, entity)),
            number(average, entity),
            number(percentile, entity),
            share(sla, entity),
            share(apdex, entity),
        )
        for entity, value in cpm.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.cpm, row.name)))


class TableReader(threading.Thread):
    """Reads the tables once a second, on its own thread; ``tables`` has the newest."""

    def __init__(self, url: str) -> None:
        super().__init__(name="batchmill-tables", daemon=True)
        self.tables = Tables()
        self._url = url
        self._end = threading.Event()

    def run(self) -> None:
        """Read until the context ends; a store that is missing or busy is tried again."""
        store: Store | None = None
        while not self._end.wait(READ_S):
            try:
                if store is None:
                    store = open_store(self._url, retry=_PATIENCE, create=False)
                self.tables = read_tables(store)
            except BatchmillError:
                continue
        if store is not None:
            store.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self.join(5.0)
