"""Which rows a snapshot is to read, as SQL."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias

from batchmill.sources import Grain, bucket_start
from batchmill.store.sql.entities import CHUNK, fitted
from batchmill.store.sql.merging import quoted, table_name
from batchmill.store.sql.reading import MOST_ROWS
from batchmill.store.sql.session import Row, Session

SEEKS = 500_000
"""Up to so many rows are looked up one by one, rather than found among all of their buckets."""
_BUCKETS = 2_000
"""How many buckets one query names."""


@dataclass(frozen=True, slots=True)
class Buckets:
    """All buckets of a grain from the first to the last."""

    grain: Grain
    first: int
    last: int

    def __iter__(self) -> Iterator[int]:
        """One after the other.

        >>> list(Buckets(Grain.HOUR, 2024022923, 2024030100))
        [2024022923, 2024030100]
        """
        moment, end = bucket_start(self.first), bucket_start(self.last)
        step = timedelta(minutes=self.grain.minutes)
        while moment <= end:
            yield self.grain.bucket(moment)
            moment += step

    def __len__(self) -> int:
        length = bucket_start(self.last) - bucket_start(self.first)
        return max(0, length // timedelta(minutes=self.grain.minutes) + 1)


@dataclass(frozen=True, slots=True)
class WideRows:
    """Reads columns of a wide table."""

    session: Session
    grain: Grain
    source: str
    columns: Sequence[str]
    layer: str | None

    def rows(self, condition: str, params: Sequence[Any], most: int) -> list[Row]:
        """The rows under a condition, ``most`` of them at most."""
        given = [*params]
        if self.layer is not None:
            condition += " AND t.entity IN (SELECT entity FROM entity_layer WHERE layer = ?)"
            given.append(fitted(self.layer))
        return self.session.rows(
            f"SELECT t.bucket, t.entity{''.join(f', t.{each}' for each in self.columns)} "
            f"FROM {quoted(table_name(self.grain, self.source))} AS t WHERE {condition} LIMIT ?",
            [*given, min(most, MOST_ROWS)],
        )


Condition: TypeAlias = tuple[str, list[Any]]
"""A condition, and its parameters."""
Wanted: TypeAlias = "Buckets | tuple[Grain, Sequence[int]]"
"""All buckets from one to another, or a list of them."""


def _seeks(buckets: Wanted, entities: Collection[int] | None) -> bool:
    """Whether rows are looked up one by one."""
    count = len(buckets) if isinstance(buckets, Buckets) else len(buckets[1])
    return entities is not None and count * len(entities) <= SEEKS


def conditions(buckets: Wanted, entities: Collection[int] | None) -> Iterator[Condition]:
    """What the rows of one query after the other have to fulfil."""
    seeks = _seeks(buckets, entities)
    # Those that are not looked up are too many to be parameters, and are numbers anyway.
    of_them = "" if entities is None or seeks else f" AND t.entity IN ({_numbers(entities)})"
    if isinstance(buckets, Buckets) and not seeks:
        yield f"t.bucket BETWEEN ? AND ?{of_them}", [buckets.first, buckets.last]
        return
    listed = list(buckets) if isinstance(buckets, Buckets) else list(buckets[1])
    keys = list(entities or ())
    for start in range(0, len(listed), _BUCKETS):
        some = listed[start : start + _BUCKETS]
        within = f"t.bucket IN ({_marks(some)})"
        if not seeks:
            yield within + of_them, some
            continue
        for first in range(0, len(keys), CHUNK):
            chunk = keys[first : first + CHUNK]
            yield f"{within} AND t.entity IN ({_marks(chunk)})", [*some, *chunk]


def slow_calls(stream: str, buckets: Buckets, entity: int | None) -> Condition:
    """The rows of a TopN stream, as a condition."""
    where = "t.stream = ? AND t.grain = ?"
    params: list[Any] = [stream, buckets.grain.value]
    if entity is None or len(buckets) > _BUCKETS:
        where += " AND t.bucket BETWEEN ? AND ?"
        params += [buckets.first, buckets.last]
    else:
        listed = list(buckets)
        where += f" AND t.bucket IN ({_marks(listed)})"
        params += listed
    if entity is not None:
        where += " AND t.entity = ?"
        params.append(entity)
    return where, params


def of_kind(kind: str | None, layer: str | None) -> Condition:
    """The entities of a kind and a layer, as a condition."""
    conditions, params = ["1 = 1"], []
    if kind is not None:
        conditions.append("kind = ?")
        params.append(kind)
    if layer is not None:
        conditions.append("key IN (SELECT entity FROM entity_layer WHERE layer = ?)")
        params.append(fitted(layer))
    return " AND ".join(conditions), params


def any_of(column: str, values: Collection[str] | None) -> Iterator[Condition]:
    """Conditions, each for some of the values, that a column has one of them; None: any."""
    if values is None:
        yield "", []
        return
    listed = list(values)
    for start in range(0, len(listed), CHUNK):
        chunk = listed[start : start + CHUNK]
        yield f" AND {column} IN ({_marks(chunk)})", chunk


def _numbers(values: Iterable[int]) -> str:
    return ", ".join(str(int(each)) for each in values)


def _marks(values: Sequence[Any]) -> str:
    return ", ".join("?" * len(values))
