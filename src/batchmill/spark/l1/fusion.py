"""Runs L1: the rows of sources become mergeable deltas, one per entity and minute.

There is one aggregation for all metrics of a source; what two metrics both need is computed once.

Where a source has tallies and many rows, equal rows are grouped first: that runs as compiled code,
which lists of keys do not. The states are then computed by Spark or, where there are many, by the
driver; see :mod:`.aggregators`. Segments of such a source are cut into slices, one for each core. A
slice is one task from its files to its groups; nothing is shuffled, and the few deltas that two
slices have in common are merged later like any others. Rows of spans lie in Spark's cache, and are
not cut. Measured on 10 million events: see the docs.

Where a batch is small, planning a query takes longer than running it. So the rows of many small
sources go into one aggregation, which computes what any source needs for the rows of all, and the
other sources ignore it. For the same reason the whole query is one text: a DataFrame that is built
step by step is analysed at every step.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Self, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T

from batchmill.aggregate import Deltas
from batchmill.sources import Grain
from batchmill.spark import sql
from batchmill.spark.input.reader import FITS
from batchmill.spark.l1.aggregators import Aggregator, NumpyAggregator, SparkAggregator
from batchmill.spark.l1.expressions import (
    RowExpressions,
    column_kind,
    grouped_rows,
    single_rows,
    sliced_rows,
)
from batchmill.spark.l1.plan import MINUTE, Recipe, SourcePlan, minute_sql

SOURCE = "_source"


@dataclass(frozen=True)
class Rows:
    """Rows of a source: some rows of a frame, under the names of the catalog."""

    frame: DataFrame
    columns: tuple[str, ...] = ()
    """As SQL, each with its name at the end; empty: all columns of the frame."""
    where: str = "true"
    slices: tuple[DataFrame, ...] = ()
    """The same rows in several frames, each for one task, if they can be read so."""
    most_rows: int | None = None
    """How many rows there are at most, if known."""

    @property
    def names(self) -> frozenset[str]:
        """The names of the columns."""
        if not self.columns:
            return frozenset(self.frame.columns)
        return frozenset(column.rsplit(" AS ", 1)[-1] for column in self.columns)

    def sql(self, view: str) -> str:
        """The rows as a query on a view of the frame."""
        return f"SELECT {', '.join(self.columns) or '*'} FROM {view} WHERE {self.where}"


@dataclass(frozen=True)
class Part:
    """A source to aggregate: its plan and its rows."""

    plan: SourcePlan
    rows: Rows
    of_spans: bool = False
    """Whether the rows are derived from spans."""


@dataclass(frozen=True)
class Result:
    """What became of the rows of a source."""

    deltas: Deltas
    invalid: int
    """How many rows are invalid."""

    @classmethod
    def merged(cls, part: Part, results: Sequence[Result]) -> Result:
        """The result of several slices of the rows."""
        deltas = part.plan.aggregator.merge([result.deltas for result in results])
        return cls(deltas, sum(result.invalid for result in results))


class Views:
    """Names for frames in queries, until the end of a ``with`` block.

    When a view is dropped, Spark also drops what it has cached of the view's frame. So there is one
    for all queries on a frame, and it is dropped when none of them is left.
    """

    def __init__(self, session: SparkSession) -> None:
        self.session = session
        self._names: dict[DataFrame, str] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._names.values():
            self.session.catalog.dropTempView(name)
        self._names.clear()

    def name(self, frame: DataFrame) -> str:
        """The view of a frame; any thread may ask."""
        with self._lock:
            if frame not in self._names:
                name = f"batchmill_{uuid.uuid4().hex}"
                frame.createOrReplaceTempView(name)
                self._names[frame] = name
            return self._names[frame]


RowQuery: TypeAlias = Callable[[str, Sequence[str], RowExpressions], str]
"""Makes the query of what is needed from rows: from each row, or from groups of equal rows."""


@dataclass(frozen=True)
class Fusion:
    """Sources whose columns can be read together, aggregated in one query."""

    parts: tuple[Part, ...]
    many: bool = True
    """Whether there are so many rows that grouping equal ones first is worth it: of one part."""

    def run(self, views: Views) -> list[Result]:
        """What became of the rows of each part."""
        needs = RowExpressions()
        for part in self.parts:
            needs.add(part.plan)
        slices = self._slices()
        aggregator = self._aggregator(needs) if slices or self._grouped else None
        if aggregator is None:
            return _run(self.parts, views, needs, SparkAggregator(), single_rows)
        if not slices:
            return _run(self.parts, views, needs, aggregator, grouped_rows)
        # The driver's part of the slices then runs in parallel, too.
        with ThreadPoolExecutor(len(slices), "batchmill-slice") as pool:
            results = pool.map(
                lambda parts: _run(parts, views, needs, aggregator, sliced_rows), slices
            )
            (part,) = self.parts
            return [Result.merged(part, [result for (result,) in results])]

    @property
    def _grouped(self) -> bool:
        """Whether equal rows are grouped though they are not cut: many rows of spans, tallies."""
        if not self.many:
            return False
        (part,) = self.parts
        return part.of_spans and bool(part.plan.recipe.tallies)

    def _aggregator(self, needs: RowExpressions) -> Aggregator | None:
        """The one for grouped rows; None if they are not to be grouped."""
        (part,) = self.parts
        most_rows = part.rows.most_rows
        if SparkAggregator.suits(needs, most_rows):
            return SparkAggregator()
        return NumpyAggregator() if NumpyAggregator.fits(needs, most_rows) else None

    def _slices(self) -> list[tuple[Part, ...]]:
        if len(self.parts) > 1:
            return []
        (part,) = self.parts
        return [
            (replace(part, rows=replace(part.rows, frame=frame)),) for frame in part.rows.slices
        ]


def fuse(parts: Sequence[Part], *, together: bool) -> list[Fusion]:
    """Group sources into queries: as few as possible if ``together``, else one for each source.

    Sources that have a column with incompatible types are kept apart.
    """
    groups: list[tuple[dict[str, str], list[Part]]] = []
    for part in parts:
        kinds = {column: column_kind(part.plan, column) for column in part.plan.needed}
        for known, members in groups if together else ():
            if all(known.get(column, kind) == kind for column, kind in kinds.items()):
                known |= kinds
                members.append(part)
                break
        else:
            groups.append((kinds, [part]))
    return [Fusion(tuple(members), many=not together) for _, members in groups]


def _run(
    parts: Sequence[Part],
    views: Views,
    needs: RowExpressions,
    aggregator: Aggregator,
    row_query: RowQuery,
) -> list[Result]:
    table = views.session.sql(_query(parts, views, needs, aggregator, row_query)).toArrow()
    return [
        _result(
            part,
            table if len(parts) == 1 else table.filter(pc.equal(table[SOURCE], number)),
            needs,
            aggregator,
        )
        for number, part in enumerate(parts)
    ]


def _result(part: Part, table: pa.Table, needs: RowExpressions, aggregator: Aggregator) -> Result:
    """The deltas of a part; its invalid rows have no minute."""
    invalid = 0
    if table[MINUTE].null_count:
        valid = pc.is_valid(table[MINUTE])
        of_invalid = aggregator.states(table.filter(pc.invert(valid)), Recipe({}), needs)
        invalid = int(of_invalid.rows.sum())
        table = table.filter(valid)
    states = aggregator.states(table, part.plan.recipe, needs)
    roles = (table[f"_r{place}"].combine_chunks() for place, _ in enumerate(part.plan.roles))
    starts = table[MINUTE].to_numpy()
    deltas = Deltas(Grain.MINUTE, starts, tuple(roles), states.rows, states.totals, states.tallies)
    return Result(deltas, invalid)


def _query(
    parts: Sequence[Part],
    views: Views,
    needs: RowExpressions,
    aggregator: Aggregator,
    row_query: RowQuery,
) -> str:
    """The query whose result the aggregator turns into the deltas of the parts."""
    width = max(len(part.plan.roles) for part in parts)
    selects = [
        _select(number, part, views.name(part.rows.frame), needs.types, width)
        for number, part in enumerate(parts)
    ]
    # With one source the column is left out: it would be one more to hash for every row.
    entity = [*([] if len(parts) == 1 else [SOURCE]), *(f"_r{i}" for i in range(width))]
    rows = f"SELECT *, {minute_sql(FITS)} AS {MINUTE} FROM ({' UNION ALL '.join(selects)})"
    group = [MINUTE, *entity]
    query = aggregator.query(row_query(rows, group, needs), group, needs)
    # Arrow and the stores take valid UTF-8 only.
    valid = [
        column if column == SOURCE else f"MAKE_VALID_UTF8({column}) AS {column}"
        for column in entity
    ]
    return f"SELECT {', '.join([MINUTE, *valid, *aggregator.columns(needs)])} FROM ({query})"


def _select(number: int, part: Part, view: str, types: Mapping[str, T.DataType], width: int) -> str:
    """The rows of one source in the columns of all."""
    names, plan = part.rows.names, part.plan
    roles = [sql.name(role) if role in names else "NULL" for role in plan.roles]
    roles += ["NULL"] * (width - len(roles))
    values = {column: _value(column, plan, names) for column in types}
    columns = [
        f"{number} AS {SOURCE}",
        "time",
        f"{FITS if FITS in names else 'true'} AS {FITS}",
        *(f"CAST({role} AS STRING) AS _r{i}" for i, role in enumerate(roles)),
        *(
            f"CAST({value} AS {types[column].simpleString()}) AS {sql.name(column)}"
            for column, value in values.items()
        ),
    ]
    return f"SELECT {', '.join(columns)} FROM ({part.rows.sql(view)})"


def _value(column: str, plan: SourcePlan, names: Collection[str]) -> str:
    """A column of a source's rows; microseconds where rows have none come from milliseconds."""
    if column not in plan.needed:
        return "NULL"
    given = sql.name(column) if column in names else "NULL"
    [field] = [field for field in plan.source.fields.values() if field.column == column]
    if not field.micros_of:
        return given
    return f"COALESCE({given}, {sql.micros(sql.name(plan.source.fields[field.micros_of].column))})"
