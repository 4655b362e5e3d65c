"""What the tests of the web server share: a store made of single calls, and a server over it.

A call is what happened, so that every figure can be worked out from calls the plain way.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http.client
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import quote, urlencode

from batchmill.oal import LogBucketed, Tally, core_script, load
from batchmill.run import Home, RunStatus, StatusReader
from batchmill.sources import Grain, endpoint_id, instance_id, service_id
from batchmill.store import (
    Batch,
    ClockReading,
    Deltas,
    EntityRow,
    StatementRow,
    Store,
    TopNRow,
    encode_numbers,
)
from batchmill.web import WebServer, WebSettings
from tests.kit.threads import WAIT_S, lasting_threads
from tests.oracle.functions import log_floor

START_S = 1_709_208_000
"""2024-02-29T12:00:00Z."""
APDEX_MS = 500
STATEMENTS = "top_n_service_database_statement"
DATABASE_STATEMENTS = "top_n_database_statement"


@dataclass(frozen=True)
class Call:
    """A call that a service answered, or a database that has no side of its own."""

    service: str
    at_s: int
    latency: int = 100
    ok: bool = True
    endpoint: str = "GET /"
    instance: str = "one"
    caller: str | None = None
    database: bool = False
    whole: bool = False
    """Whether its event has no latency in microseconds."""

    @property
    def micros(self) -> int:
        """The latency in microseconds, mostly not whole milliseconds; 0 ms are from 120 to 900."""
        if self.whole:
            return self.latency * 1000
        if self.latency == 0:
            return 120 + self.at_s // 60 % 781
        return self.latency * 1000 + self.at_s // 60 % 1000

    @property
    def id(self) -> str:
        return service_id(self.service, not self.database)


def bucket_of(grain: Grain, at_s: int) -> int:
    """The bucket of a moment."""
    return grain.bucket(datetime.fromtimestamp(at_s, UTC))


def percentile(calls: Sequence[Call], rank: int) -> float:
    """The milliseconds at a rank, to the bucket, counted the plain way."""
    floors = sorted(log_floor(call.micros) for call in calls)
    return floors[(len(floors) * rank + 50) // 100 - 1] / 1000


def figures(calls: Sequence[Call], minutes: float | None = None) -> dict[str, Any]:
    """What a service's figures must be over some calls; cpm by so many minutes."""
    if not calls:
        return dict.fromkeys(("cpm", "avg", "p99", "success", "apdex"))
    good = [call for call in calls if call.ok]
    satisfied = sum(call.latency <= APDEX_MS for call in good)
    tolerated = sum(APDEX_MS < call.latency <= 4 * APDEX_MS for call in good)
    score = satisfied * 10_000 + tolerated * 10_000 // 2
    count = len(calls)
    return {
        "cpm": None if minutes is None else round(count / minutes, 3),
        "avg": sum(call.micros for call in calls) // count / 1000,
        "p99": percentile(calls, 99),
        "success": len(good) * 10_000 // count / 10_000,
        "apdex": score // count / 10_000,
    }


@dataclass
class CallWriter:
    """Writes calls to a store, batch by batch, as the pipeline would."""

    store: Store
    stream: str = "live"
    number: int = 0
    script: str | None = None
    _columns: Mapping[str, tuple[str, ...]] = field(init=False)

    def __post_init__(self) -> None:
        metrics = load(self.script or core_script())
        self._columns = self.store.register(metrics, stream=self.stream).columns
        claim = self.store.claim(self.stream, "checkpoint", fresh=True, committed=None)
        self._epoch = claim.epoch

    def write(
        self,
        calls: Sequence[Call],
        topn: Sequence[TopNRow] = (),
        statements: Sequence[StatementRow] = (),
        entities: Sequence[EntityRow] = (),
        clock: ClockReading | None = None,
    ) -> None:
        """``topn`` and ``statements`` name ``entities`` by their place among those."""
        book = _Book(list(entities))
        deltas = []
        served = [call for call in calls if not call.database]
        deltas += self._deltas("Service", "service", served, book.service)
        deltas += self._deltas("Endpoint", "endpoint", served, book.endpoint)
        deltas += self._deltas("ServiceInstance", "service_instance", served, book.instance)
        related = [call for call in calls if call.caller is not None]
        both = [relation for relation in related if not relation.database]
        for side, seen in (("server", both), ("client", related)):
            prefix = f"service_relation_{side}"
            deltas += self._deltas("ServiceRelation", prefix, seen, book.relation)
        newest = max((bucket_of(Grain.MINUTE, call.at_s) for call in calls), default=None)
        batch = Batch(self.stream, self._epoch, self.number, newest, book.rows, deltas)
        batch.topn, batch.statements, batch.clock = list(topn), list(statements), clock
        assert self.store.commit(batch).applied
        self.number += 1

    def _deltas(
        self, source: str, prefix: str, calls: Sequence[Call], number: Callable[[Call], int]
    ) -> list[Deltas]:
        made = []
        for grain in Grain if calls else ():
            places: dict[tuple[int, int], list[Call]] = {}
            for call in calls:
                places.setdefault((bucket_of(grain, call.at_s), number(call)), []).append(call)
            cells: dict[str, list[Any]] = {}
            for inside in places.values():
                for name, values in _cells(prefix, inside).items():
                    for column, value in zip(self._columns.get(name, ()), values, strict=False):
                        cells.setdefault(column, []).append(value)
            buckets, entities = zip(*places, strict=True)
            made.append(Deltas(source, grain, list(buckets), list(entities), cells))
        return made


@functools.cache
def log_buckets() -> LogBucketed:
    """The buckets of the percentiles in microseconds."""
    [state] = load(core_script())["service_percentile_micros"].states
    assert isinstance(state, Tally)
    assert isinstance(state.key, LogBucketed)
    return state.key


def _cells(prefix: str, calls: Sequence[Call]) -> dict[str, tuple[Any, ...]]:
    count, total = len(calls), sum(call.latency for call in calls)
    good = [call for call in calls if call.ok]
    tally: dict[int, int] = {}
    for call in calls:
        tally[call.latency // 10] = tally.get(call.latency // 10, 0) + 1
    logs = [log_buckets().of(call.micros) for call in calls]
    micros = sum(call.micros for call in calls)
    satisfied = sum(call.latency <= APDEX_MS for call in good)
    tolerated = sum(APDEX_MS < call.latency <= 4 * APDEX_MS for call in good)
    sla = "call_sla" if "relation" in prefix else "sla"
    return {
        f"{prefix}_cpm": (count,),
        f"{prefix}_resp_time": (total, count),
        f"{prefix}_{sla}": (len(good), count),
        f"{prefix}_percentile": (encode_numbers(tally),),
        f"{prefix}_resp_time_micros": (0, micros, count),
        f"{prefix}_percentile_micros": (encode_numbers(Counter(logs)),),
        f"{prefix}_apdex": (satisfied, tolerated, count),
    }


class _Book:
    """The entities of a batch."""

    def __init__(self, rows: list[EntityRow]) -> None:
        self.rows = rows
        self._numbers = {(row.kind, row.id): n for n, row in enumerate(rows)}

    def service(self, call: Call) -> int:
        layers = {"VIRTUAL_DATABASE"} if call.database else {"GENERAL"}
        return self._number("service", call.id, call.service, layers)

    def endpoint(self, call: Call) -> int:
        return self._number("endpoint", endpoint_id(call.id, call.endpoint), call.endpoint)

    def instance(self, call: Call) -> int:
        return self._number("instance", instance_id(call.id, call.instance), call.instance)

    def relation(self, call: Call) -> int:
        if call.database:
            self.service(call)
        id_ = f"{service_id(call.caller, True)}-{call.id}"
        return self._number("service_relation", id_, call.service, set())

    def _number(self, kind: str, id_: str, name: str, layers: Any = ("GENERAL",)) -> int:
        if (kind, id_) not in self._numbers:
            self._numbers[kind, id_] = len(self.rows)
            self.rows.append(EntityRow(kind, id_, name, frozenset(layers), {"service": name}))
        return self._numbers[kind, id_]


@dataclass
class Client:
    """Asks a server."""

    address: str
    token: str | None = None

    def ask(self, path: str, method: str = "GET", body: str | None = None, **params: Any) -> Any:
        """Status and JSON of the answer."""
        status, _, read = self.raw(path, method, body, **params)
        return status, json.loads(read)

    def raw(
        self, path: str, method: str = "GET", body: str | None = None, **params: Any
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body."""
        named = {name.rstrip("_"): value for name, value in params.items()}
        host = self.address.partition("://")[2]
        connection = http.client.HTTPConnection(host, timeout=WAIT_S)
        headers = {} if self.token is None else {"Authorization": f"Bearer {self.token}"}
        if body is not None:
            headers["Content-Type"] = "application/x-www-form-urlencoded"
        with contextlib.closing(connection):
            query = f"?{urlencode(named)}" if named else ""
            connection.request(method, quote(path, safe="/=%+?&") + query, body, headers)
            response = connection.getresponse()
            response_headers = {name.lower(): value for name, value in response.getheaders()}
            return response.status, response_headers, response.read()

    def get(self, path: str, **params: Any) -> Any:
        """The JSON of an answer that must be good."""
        status, answer = self.ask(path, **params)
        assert status == 200, answer
        return answer


class FakeRun(StatusReader):
    """A run whose status, as JSON, is what a function returns."""

    def __init__(self, as_json: Callable[[], Mapping[str, Any]]) -> None:
        super().__init__(Home(Path()))
        self._as_json = as_json

    def read(self) -> RunStatus:
        """Something that has nothing but the JSON."""
        return cast("RunStatus", SimpleNamespace(as_json=self._as_json))


@contextlib.contextmanager
def serving(store_url: str, **more: Any) -> Iterator[Client]:
    """A server on a free port, in a thread; stopped in the end."""
    run = more.pop("run", None)
    token = more.pop("token", None)
    kept = {name: more.pop(name) for name in ("traces", "normalise_names") if name in more}
    server = WebServer(store_url, WebSettings(port=0, **more), run=run, **kept)
    ready, failed = threading.Event(), []

    def work() -> None:
        try:
            asyncio.run(server.serve(ready.set))
        except BaseException as error:  # noqa: BLE001 - told below
            failed.append(error)
            ready.set()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert ready.wait(WAIT_S)
        assert not failed, failed
        yield Client(server.address, token)
    finally:
        server.stop()
        thread.join(WAIT_S)
    assert not thread.is_alive()
    assert not failed, failed


@contextlib.contextmanager
def serving_all(store_url: str, **more: Any) -> Iterator[Client]:
    """A server for all tests of a module: its threads for queries may outlive each of them."""
    with lasting_threads("batchmill-web"), serving(store_url, **more) as client:
        yield client
