"""Slow statements: the N slowest of each database, service and cache, and how often each text ran.

Keeping the N slowest of a part is exact: what is not among them cannot be among the N slowest of
the whole, whatever order the statements came in and however they were split.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from heapq import nsmallest
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from batchmill.errors import ConfigError, check_int
from batchmill.sources import Grain, service_id
from batchmill.store import StatementRow, TopNRow

if TYPE_CHECKING:
    from batchmill.aggregate.cells import EntityBook

DATABASE = "top_n_database_statement"
SERVICE_DATABASE = "top_n_service_database_statement"
CACHE_READ = "top_n_cache_read_command"
CACHE_WRITE = "top_n_cache_write_command"
"""The streams: slow statements of a database, the same of the service that calls it, slow cache
reads, and slow cache writes. The entity of each is a service."""

STATEMENT_LIMIT = 2000
"""Characters of a statement that are kept; the rest is cut off."""
_MICROSECOND = timedelta(microseconds=1)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_CACHED_TEXTS = 10_000
_RECORD_BYTES = 1_024

NORMALISED = (
    # A text in quotes; a quote inside is written twice. Several side by side are one.
    (r"(?:'[^']*')+", "?"),
    # A number that is no part of a name, with fraction, exponent and sign of a placeholder ($1).
    (
        r"(?<![A-Za-z0-9_])[$]?(?:0[xX][0-9A-Fa-f]+|[0-9]+(?:[.][0-9]+)?(?:[eE][+-]?[0-9]+)?)"
        r"(?![A-Za-z0-9_])",
        "?",
    ),
    # Blanks: space, tab, line feed, vertical tab, form feed, carriage return.
    (r"[ \t\n\x0B\f\r]+", " "),
    # A list of placeholders, however long.
    (r"(?<![A-Za-z0-9_])([iI][nN]) ?[(] ?[?][?, ]*[)]", "$1 (?)"),
)
"""Patterns and replacements that turn statements which differ only in their values into one text.
Applied in this order; then blanks at both ends are removed. The patterns mean the same in Java and
in Python."""
_REPLACED = tuple(
    (re.compile(pattern), replacement.replace("$1", r"\1")) for pattern, replacement in NORMALISED
)


@functools.lru_cache(_CACHED_TEXTS)
def normalise(statement: str) -> str:
    """A statement without its values.

    >>> normalise("SELECT *  FROM orders WHERE id IN (1, 2) AND name = 'x'")
    'SELECT * FROM orders WHERE id IN (?) AND name = ?'
    """
    for pattern, replacement in _REPLACED:
        statement = pattern.sub(replacement, statement)
    return statement.strip(" ")


@dataclass(frozen=True, slots=True)
class Statement:
    """A call of a database or a cache, of which the slowest are kept."""

    time: datetime
    """When it started."""
    service: str
    """The name of the service that made it."""
    store: str
    """The name of the database or cache."""
    latency: int
    """How long it took, in milliseconds."""
    statement: str
    system: str = ""
    """The kind of database or cache, such as ``mysql`` or ``redis``: each has its own threshold."""
    cache_operation: Literal["Read", "Write", "Others"] | None = None
    """What a cache was asked for; None: it is a database."""
    trace_id: str = ""
    span_id: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.time, datetime) or self.time.tzinfo is None:
            raise ConfigError("time", self.time, "a datetime with a time zone: datetime.now(UTC)")
        check_int("latency", self.latency, 0)


@dataclass(frozen=True)
class SlowThresholds:
    """Above how many milliseconds a statement is slow, by database or cache system.

    The case of a system's name does not matter; here they are in lower case.

    >>> SlowThresholds.parse("default:200,mongodb:100").systems["mongodb"]
    100
    """

    default_ms: int
    systems: Mapping[str, int] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name, limit in (("default", self.default_ms), *self.systems.items()):
            if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
                raise ConfigError(
                    f"slow threshold of {name}", limit, "whole milliseconds, 0 or more"
                )
        limits = {name.lower(): limit for name, limit in self.systems.items()}
        if len(limits) < len(self.systems):
            names = ", ".join(self.systems)
            raise ConfigError("slow thresholds", names, "unambiguous: one is there twice")
        object.__setattr__(self, "systems", MappingProxyType(limits))

    @classmethod
    def parse(cls, text: str) -> SlowThresholds:
        """Read ``system:ms`` pairs with commas between; ``default`` must be among them."""
        limits: dict[str, int] = {}
        for pair in text.split(","):
            system, colon, digits = (part.strip() for part in pair.rpartition(":"))
            if not (colon and system and digits.isascii() and digits.isdigit()):
                raise ConfigError(
                    "slow thresholds",
                    text,
                    f"pairs like default:200,mongodb:100, which {pair.strip()!r} is not",
                )
            system = system.lower()
            if system in limits:
                raise ConfigError(
                    "slow thresholds", text, f"unambiguous: {system!r} is there twice"
                )
            limits[system] = int(digits)
        if "default" not in limits:
            raise ConfigError(
                "slow thresholds", text, "complete: it has no default, as in default:200"
            )
        return cls(limits.pop("default"), limits)

    def of(self, system: str) -> int:
        """The limit of a system."""
        return self.systems.get(system.lower(), self.default_ms)


@dataclass(frozen=True, kw_only=True)
class TopNThresholds:
    """The slow thresholds of databases and of caches."""

    database: SlowThresholds = field(default_factory=lambda: SlowThresholds(200, {"mongodb": 100}))
    cache: SlowThresholds = field(default_factory=lambda: SlowThresholds(20, {"redis": 10}))


class Record(NamedTuple):
    """A slow statement; records sort slowest first, equals by time, then by ids and text."""

    negative_latency: int
    time_us: int
    trace_id: str
    span_id: str
    statement: str


Place: TypeAlias = tuple[str, str, int]
"""Stream, entity id, and minute as ``yyyyMMddHHmm``."""


@dataclass
class SlowestStatements:
    """The ``n`` slowest statements of each place, and the runs of all statements."""

    n: int
    limits: TopNThresholds
    records: dict[Place, list[Record]] = field(default_factory=dict)
    runs: dict[tuple[Place, str], tuple[int, int]] = field(default_factory=dict)
    """By place and normalised text: how often it ran, and how many milliseconds altogether."""

    def add(self, statements: Iterable[Statement]) -> None:
        """Count statements, and keep the slowest."""
        for call in statements:
            if call.cache_operation == "Others":
                continue
            text = call.statement[:STATEMENT_LIMIT]
            minute = Grain.MINUTE.bucket(call.time)
            time_us = (call.time - _EPOCH) // _MICROSECOND
            record = Record(-call.latency, time_us, call.trace_id, call.span_id, text)
            kind = self.limits.database if call.cache_operation is None else self.limits.cache
            slow = call.latency > kind.of(call.system)
            for stream, entity in _streams(call):
                place = (stream, entity, minute)
                self._count((place, normalise(text)), 1, call.latency)
                if slow:
                    self._keep(place, [record])

    def merge(self, other: SlowestStatements) -> None:
        """Add those of another part."""
        for place, records in other.records.items():
            self._keep(place, records)
        for key, (runs, total_ms) in other.runs.items():
            self._count(key, runs, total_ms)

    @property
    def nbytes(self) -> int:
        """The memory that it takes, roughly."""
        return _RECORD_BYTES * (sum(map(len, self.records.values())) + len(self.runs))

    def places(self) -> Iterator[tuple[str, str]]:
        """Stream and entity of each record and each statement, for the limit of new entities."""
        for (stream, entity, _), records in self.records.items():
            yield from ((stream, entity) for _ in records)
        yield from ((stream, entity) for (stream, entity, _), _ in self.runs)

    def topn_rows(self, book: EntityBook) -> list[TopNRow]:
        """The records as a store takes them."""
        return [
            TopNRow(
                stream,
                entity_number(stream, entity, book),
                minute,
                -record.negative_latency,
                record.time_us,
                record.trace_id,
                record.span_id,
                record.statement,
                normalise(record.statement),
            )
            for (stream, entity, minute), records in self.records.items()
            for record in nsmallest(self.n, records)
        ]

    def statement_rows(self, book: EntityBook) -> list[StatementRow]:
        """The runs as a store takes them."""
        return [
            StatementRow(
                stream,
                entity_number(stream, entity, book),
                minute,
                text,
                runs,
                total_ms,
            )
            for ((stream, entity, minute), text), (runs, total_ms) in self.runs.items()
        ]

    def _keep(self, place: Place, records: Iterable[Record]) -> None:
        kept = self.records.setdefault(place, [])
        kept += records
        if len(kept) > 4 * self.n:  # now and then, not for each record
            self.records[place] = nsmallest(self.n, kept)

    def _count(self, key: tuple[Place, str], runs: int, total_ms: int) -> None:
        before = self.runs.get(key, (0, 0))
        self.runs[key] = (before[0] + runs, before[1] + total_ms)


def entity_number(stream: str, entity: str, book: EntityBook) -> int:
    """The number of the entity of a record."""
    layer = "VIRTUAL_CACHE" if stream in (CACHE_READ, CACHE_WRITE) else "VIRTUAL_DATABASE"
    layers = {"GENERAL" if stream == SERVICE_DATABASE else layer}
    return book.service_number(stream, entity, layers)


def _streams(call: Statement) -> tuple[tuple[str, str], ...]:
    store = service_id(call.store, False)
    if call.cache_operation is None:
        return ((DATABASE, store), (SERVICE_DATABASE, service_id(call.service, True)))
    return ((CACHE_READ if call.cache_operation == "Read" else CACHE_WRITE, store),)
