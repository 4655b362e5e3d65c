"""L1: the rows of one source become mergeable deltas, one per entity and minute.

One aggregation for all metrics of the source. Conditions are computed once per row, as columns;
what two metrics both need is aggregated once. Tallies are collected as lists and shortened to
``key:count`` afterwards, on the few rows that are left: measured against grouping by key first,
that took between a third and four fifths of the time.

Where a batch is small, planning a query takes longer than running it. So the rows of many small
sources are put into one aggregation: what one source needs is computed for the rows of the others
as well, and left alone. For the same reason the whole query is one text: a DataFrame that is built
step by step is analysed at every step.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql import types as T

from batchmill.oal import State
from batchmill.spark import _sql
from batchmill.spark._plan import MINUTE, ROWS, SourcePlan, minute_sql
from batchmill.spark._reader import FITS
from batchmill.spark._schema import spark_type

SOURCE = "_source"


@dataclass(frozen=True)
class Rows:
    """Rows of a source: some of a frame's, under the names of the catalog."""

    frame: DataFrame
    columns: tuple[str, ...] = ()
    """As SQL, each with its name at the end; none stands for all columns of the frame."""
    where: str = "true"

    @property
    def names(self) -> frozenset[str]:
        """The columns that there are."""
        if not self.columns:
            return frozenset(self.frame.columns)
        return frozenset(each.rsplit(" AS ", 1)[-1] for each in self.columns)

    def sql(self, view: str) -> str:
        """The rows as a query on a view of the frame."""
        return f"SELECT {', '.join(self.columns) or '*'} FROM {view} WHERE {self.where}"


@dataclass(frozen=True)
class Fusion:
    """Sources whose columns go together, aggregated as one."""

    parts: tuple[tuple[SourcePlan, Rows], ...]

    def table(self) -> pa.Table:
        """The deltas of all parts: source, minute, roles, number of rows, then the plans' sums.

        Columns that a source does not have are null. Rows that do not fit come out with the minute
        null, to be counted. :meth:`split` takes the parts apart again.
        """
        views: dict[int, tuple[str, DataFrame]] = {}
        for _, rows in self.parts:
            views.setdefault(id(rows.frame), (f"batchmill_{uuid.uuid4().hex}", rows.frame))
        for view, frame in views.values():
            frame.createOrReplaceTempView(view)
        session = self.parts[0][1].frame.sparkSession
        try:
            query = self._sql({key: view for key, (view, _) in views.items()})
            return session.sql(query).toArrow()
        finally:
            for view, _ in views.values():
                session.catalog.dropTempView(view)

    def split(self, table: pa.Table) -> list[pa.Table]:
        """Each part's own deltas."""
        tables = []
        for number, (plan, _) in enumerate(self.parts):
            own = table if len(self.parts) == 1 else table.filter(pc.equal(table[SOURCE], number))
            columns = {MINUTE: own[MINUTE], ROWS: own[ROWS]}
            columns |= {each: own[f"_r{i}"] for i, each in enumerate(plan.roles)}
            columns |= {each: own[each] for each in plan.sums}
            tables.append(pa.table(columns))
        return tables

    def _sql(self, views: Mapping[int, str]) -> str:
        types: dict[str, T.DataType] = {}
        flags: dict[str, str] = {}
        sums: dict[str, str] = {}
        texts: dict[str, State] = {}
        for plan, _ in self.parts:
            types |= {each: _wider(plan, each, types) for each in plan.needed}
            flags |= plan.flags
            sums |= plan.sums
            texts |= plan.texts
        width = max(len(plan.roles) for plan, _ in self.parts)
        selects = [
            _select(number, plan, rows, views[id(rows.frame)], types, width)
            for number, (plan, rows) in enumerate(self.parts)
        ]
        # With one source the column is left out: it would be one more to hash for every row.
        single = len(self.parts) == 1
        keys = [*([] if single else [SOURCE]), *(f"_r{i}" for i in range(width))]
        return _aggregate(" UNION ALL ".join(selects), keys, flags, sums, texts)


def fuse(parts: Sequence[tuple[SourcePlan, Rows]], *, together: bool) -> list[Fusion]:
    """Who is aggregated with whom: as many as possible ``together``, or each by itself.

    A column that two sources have with types that exclude each other keeps them apart.
    """
    groups: list[tuple[dict[str, str], list[tuple[SourcePlan, Rows]]]] = []
    for plan, rows in parts:
        kinds = {each: _kind(plan, each) for each in plan.needed}
        for known, members in groups if together else ():
            if all(known.get(each, kind) == kind for each, kind in kinds.items()):
                known |= kinds
                members.append((plan, rows))
                break
        else:
            groups.append((kinds, [(plan, rows)]))
    return [Fusion(tuple(members)) for _, members in groups]


def _select(
    number: int,
    plan: SourcePlan,
    rows: Rows,
    view: str,
    types: Mapping[str, T.DataType],
    width: int,
) -> str:
    """The rows of one source in the columns of all."""
    there = rows.names
    roles = [_sql.name(each) if each in there else "NULL" for each in plan.roles]
    roles += ["NULL"] * (width - len(roles))
    values = {
        each: _sql.name(each) if each in plan.needed and each in there else "NULL" for each in types
    }
    columns = [
        f"{number} AS {SOURCE}",
        "time",
        f"{FITS if FITS in there else 'true'} AS {FITS}",
        *(f"CAST({each} AS STRING) AS _r{i}" for i, each in enumerate(roles)),
        *(
            f"CAST({value} AS {types[each].simpleString()}) AS {_sql.name(each)}"
            for each, value in values.items()
        ),
    ]
    return f"SELECT {', '.join(columns)} FROM ({rows.sql(view)})"


def _aggregate(
    rows: str,
    keys: Sequence[str],
    flags: Mapping[str, str],
    sums: Mapping[str, str],
    texts: Mapping[str, State],
) -> str:
    flagged = [f"{minute_sql(FITS)} AS {MINUTE}"]
    flagged += [f"COALESCE({each}, false) AS {flag}" for flag, each in flags.items()]
    query = f"SELECT *, {', '.join(flagged)} FROM ({rows})"
    grouped = ", ".join([MINUTE, *keys])
    summed = ", ".join(f"{each} AS {column}" for column, each in sums.items())
    query = f"SELECT {grouped}, COUNT(1) AS {ROWS}, {summed} FROM ({query}) GROUP BY {grouped}"
    # What is not UTF-8 could not be told to anybody.
    plain = [MINUTE, ROWS, *(each for each in sums if each not in texts)]
    plain += [each if each == SOURCE else f"MAKE_VALID_UTF8({each}) AS {each}" for each in keys]
    ordered = [*plain, *(f"SORT_ARRAY({each}) AS {each}" for each in texts)]
    query = f"SELECT {', '.join(ordered)} FROM ({query})"
    if not texts:
        return query
    # Lists of keys become the store's text, in steps, so that nothing is computed twice.
    begun = ", ".join(f"{_sql.starts(state, each)} AS {each}_at" for each, state in texts.items())
    query = f"SELECT *, {begun} FROM ({query})"
    shortened = [each.rsplit(" AS ", 1)[-1] for each in plain]
    shortened += [
        f"{_sql.pieces(state, each, starts=f'{each}_at')} AS {each}"
        for each, state in texts.items()
    ]
    return f"SELECT {', '.join(shortened)} FROM ({query})"


def _type(plan: SourcePlan, column: str) -> T.DataType:
    [field] = [each for each in plan.source.fields.values() if each.column == column]
    return spark_type(field.type)


def _kind(plan: SourcePlan, column: str) -> str:
    kind = _type(plan, column)
    return "whole" if isinstance(kind, T.IntegerType | T.LongType) else kind.simpleString()


def _wider(plan: SourcePlan, column: str, known: Mapping[str, T.DataType]) -> T.DataType:
    kind = _type(plan, column)
    before = known.get(column, kind)
    return before if isinstance(before, T.LongType) else kind
