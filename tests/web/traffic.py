"""Calls between services, put into a store without Spark: what the pages and the API are shown.

A call is counted for its service, endpoint, instance and relation, minute by minute; hours and days
are made from the same calls. So whoever knows the calls knows every number on a page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from batchmill.oal import (
    ApdexCount,
    Bucketed,
    Count,
    LogBucketed,
    MetricSet,
    State,
    Sum,
    Tally,
    core_script,
    load,
)
from batchmill.sources import (
    Grain,
    endpoint_id,
    instance_id,
    minute_bucket,
    service_id,
)
from batchmill.store import (
    Batch,
    Deltas,
    EntityRow,
    StatementRow,
    Store,
    TopNRow,
    encode_numbers,
)

OF_DATABASES, OF_SERVICES = "top_n_database_statement", "top_n_service_database_statement"
APDEX_MS = 500
CORE = core_script().read_text("utf-8")
WITHOUT_MICROS = "\n".join(line for line in CORE.splitlines() if "Micros" not in line)
"""The core metrics of a version that had none in microseconds."""
SOURCES = ("Service", "ServiceInstance", "Endpoint", "ServiceRelation", "DatabaseAccess")
USER = "User"
"""The caller of a request from outside."""


@dataclass(frozen=True)
class Call:
    """A call as its service sees it; with a caller, the caller sees the same."""

    service: str
    latency: float
    """In milliseconds."""
    at: int
    """Seconds since 1970."""
    ok: bool = True
    endpoint: str = "GET /"
    caller: str | None = None
    layer: str = "GENERAL"
    caller_ok: bool | None = None
    """Whether it succeeded for its caller, if that differs."""

    @property
    def id(self) -> str:
        """That of the service."""
        return service_id(self.service, not self.layer.startswith("VIRTUAL_"))


@dataclass(frozen=True)
class Statement:
    """A slow statement of a service, and how often ones of its form ran in the minute."""

    service: str
    database: str
    text: str
    latency: int
    at: int
    runs: int = 1


class Shop:
    """Writes calls into a store, commit by commit, as a pipeline does."""

    def __init__(self, store: Store, stream: str = "live", script: str | None = None) -> None:
        self._store = store
        self._stream = stream
        self._number = 0
        self._metrics: MetricSet = load(core_script() if script is None else script)
        claim = store.claim(stream, "checkpoint-1", fresh=True, committed=None)
        self._epoch = claim.epoch
        self._layout = store.register(self._metrics, retire=True, stream=stream)

    def commit(self, calls: Sequence[Call], statements: Sequence[Statement] = ()) -> None:
        """One micro-batch."""
        entities = _Entities()
        for call in calls:
            if call.layer.startswith("VIRTUAL_"):
                entities.add(EntityRow("service", call.id, call.service, frozenset({call.layer})))
        deltas = [
            self._deltas(source, grain, calls, entities) for source in SOURCES for grain in Grain
        ]
        moments = [*(call.at for call in calls), *(statement.at for statement in statements)]
        batch = Batch(
            self._stream,
            self._epoch,
            self._number,
            max(map(_minute, moments), default=None),
            deltas=deltas,
            topn=[row for statement in statements for row in _top(statement, entities)],
            statements=[row for statement in statements for row in _ran(statement, entities)],
            counters={("rows", "Span", ""): len(calls)},
        )
        batch.entities = entities.rows
        assert self._store.commit(batch).applied
        self._number += 1

    def _deltas(
        self, source: str, grain: Grain, calls: Iterable[Call], entities: _Entities
    ) -> Deltas:
        places: dict[tuple[int, int], list[dict[str, Any]]] = {}
        for call in calls:
            bucket = grain.bucket(datetime.fromtimestamp(call.at, UTC))
            for entity, row in _rows(source, call):
                places.setdefault((bucket, entities.add(entity)), []).append(row)
        columns = self._layout.columns
        cells: dict[str, list[Any]] = {}
        for metric in self._metrics:
            if metric.source != source:
                continue
            if "_mq_" in metric.name:  # nobody sends messages here
                cells |= {column: [None] * len(places) for column in columns[metric.name]}
                continue
            made = [
                [cell for state in metric.states for cell in _cells(state, rows)]
                for rows in places.values()
            ]
            for place, column in enumerate(columns[metric.name]):
                cells[column] = [line[place] for line in made]
        return Deltas(
            source, grain, [bucket for bucket, _ in places], [number for _, number in places], cells
        )


class _Entities:
    """The entities of a batch, each once."""

    def __init__(self) -> None:
        self.rows: list[EntityRow] = []
        self._numbers: dict[tuple[str, str], int] = {}

    def add(self, row: EntityRow) -> int:
        """Its number."""
        key = (row.kind, row.id)
        if key not in self._numbers:
            self._numbers[key] = len(self.rows)
            self.rows.append(row)
        return self._numbers[key]


def _rows(source: str, call: Call) -> Iterable[tuple[EntityRow, dict[str, Any]]]:
    layers = frozenset({call.layer})
    row = {"name": call.service, "status": call.ok, "type": "HTTP"}
    row |= {"latency": int(call.latency), "latencyMicros": round(call.latency * 1000)}
    observed = not call.layer.startswith("VIRTUAL_")
    roles = {"service": call.service}
    if source == "Service" and observed:
        yield EntityRow("service", call.id, call.service, layers, roles), row
    elif source == "ServiceInstance" and observed:
        name = f"{call.service}-1"
        id_ = instance_id(call.id, name)
        yield EntityRow("instance", id_, name, layers, {**roles, "name": name}), row
    elif source == "Endpoint" and observed:
        id_ = endpoint_id(call.id, call.endpoint)
        names = {**roles, "name": call.endpoint}
        yield EntityRow("endpoint", id_, call.endpoint, layers, names), row
    elif source == "ServiceRelation" and call.caller is not None:
        id_ = f"{service_id(call.caller, call.caller != USER)}-{call.id}"
        ends = {"source_service": call.caller, "dest_service": call.service}
        entity = EntityRow("service_relation", id_, call.service, layers, ends)
        seen = {"SERVER": call.ok} if observed else {}
        if call.caller != USER:
            seen["CLIENT"] = call.ok if call.caller_ok is None else call.caller_ok
        for side, status in seen.items():
            yield entity, {**row, "detectPoint": side, "status": status}
    elif source == "DatabaseAccess" and call.layer == "VIRTUAL_DATABASE":
        yield EntityRow("service", call.id, call.service, layers, roles), row


def _cells(state: State, rows: Sequence[dict[str, Any]]) -> list[Any]:
    cell = _cell(state, rows)
    if isinstance(state, Sum) and state.value.type.kind == "long":  # the upper half, and the lower
        return [None, None] if cell is None else [cell >> 32, cell & 0xFFFFFFFF]
    return [cell]


def _cell(state: State, rows: Sequence[dict[str, Any]]) -> Any:
    chosen = [row for row in rows if _holds(state, row)]
    if isinstance(state, Count):
        return len(chosen)
    if isinstance(state, ApdexCount):
        return sum(row["status"] and state.of(row["latency"], APDEX_MS) for row in chosen)
    if isinstance(state, Sum):
        return sum(row[state.value.text] for row in chosen) if chosen else None
    assert isinstance(state, Tally)
    assert isinstance(state.key, Bucketed | LogBucketed)
    keys = [state.key.of(row[state.key.value.text]) for row in chosen]
    return encode_numbers({key: keys.count(key) for key in keys}) if keys else None


_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "==": lambda one, other: one == other,
    "!=": lambda one, other: one != other,
}


def _holds(state: State, row: dict[str, Any]) -> bool:
    return all(
        _COMPARE[condition.op](row.get(str(condition.path.parts[0])), condition.literal)
        for condition in state.where
    )


def _minute(at: int) -> int:
    return minute_bucket(datetime.fromtimestamp(at, UTC))


def _streams(slow: Statement, entities: _Entities) -> Iterable[tuple[str, int]]:
    """The statement is told of under its database, and under the service that ran it."""
    name, layers = slow.database, frozenset({"VIRTUAL_DATABASE"})
    database = EntityRow("service", service_id(name, False), name, layers, {"service": name})
    yield OF_DATABASES, entities.add(database)
    name, layers = slow.service, frozenset({"GENERAL"})
    service = EntityRow("service", service_id(name, True), name, layers, {"service": name})
    yield OF_SERVICES, entities.add(service)


def _top(slow: Statement, entities: _Entities) -> Iterable[TopNRow]:
    trace, span = f"{slow.at:032x}", f"{slow.latency:016x}"
    for stream, entity in _streams(slow, entities):
        yield TopNRow(
            *(stream, entity, _minute(slow.at), slow.latency, slow.at * 1_000_000),
            *(trace, span, slow.text, slow.text),
        )


def _ran(slow: Statement, entities: _Entities) -> Iterable[StatementRow]:
    for stream, entity in _streams(slow, entities):
        total_ms = slow.runs * slow.latency
        yield StatementRow(stream, entity, _minute(slow.at), slow.text, slow.runs, total_ms)
