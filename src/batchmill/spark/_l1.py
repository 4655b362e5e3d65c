"""L1: the rows of one source become mergeable deltas, one per entity and minute.

One aggregation for all metrics of the source. Conditions are computed once per row, as columns;
what two metrics both need is aggregated once. Tallies are collected as lists and shortened to
``key:count`` afterwards, on the few rows that are left: measured against grouping by key first,
that took a third of the time.

Where a batch is small, planning a query takes longer than running it. So the rows of many small
sources are put into one aggregation: what one source needs is computed for the rows of the others
as well, and left alone.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from batchmill.oal import State
from batchmill.spark import _sql
from batchmill.spark._plan import MINUTE, ROWS, SourcePlan, minute_sql
from batchmill.spark._reader import FITS
from batchmill.spark._schema import spark_type

SOURCE = "_source"


def l1(rows: DataFrame, plan: SourcePlan) -> DataFrame:
    """The deltas of ``rows``: minute, roles, number of rows, then the plan's sums.

    ``rows`` has ``time`` and columns of the catalog; those that are not there are null. ``_fits``
    says whether a row fits; those that do not come out with the minute null, to be counted.
    """
    whole = _complete(rows, {each: _type(plan, each) for each in plan.needed})
    return _aggregate(
        whole, [_sql.name(each) for each in plan.roles], plan.flags, plan.sums, plan.texts
    )


@dataclass(frozen=True)
class Fusion:
    """Several sources whose columns go together, aggregated as one."""

    parts: tuple[tuple[SourcePlan, DataFrame], ...]

    def deltas(self) -> DataFrame:
        """The deltas of all parts; :meth:`split` takes them apart again."""
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
        frames = []
        for number, (plan, rows) in enumerate(self.parts):
            whole = _complete(rows, {each: types[each] for each in plan.needed})
            frames.append(
                whole.selectExpr(
                    f"{number} AS {SOURCE}",
                    "time",
                    FITS,
                    *(
                        f"CAST({_sql.name(each)} AS STRING) AS _r{i}"
                        for i, each in enumerate(plan.roles)
                    ),
                    *(f"CAST(NULL AS STRING) AS _r{i}" for i in range(len(plan.roles), width)),
                    *(_column(each, plan, kind) for each, kind in types.items()),
                )
            )
        together = functools.reduce(DataFrame.unionAll, frames)
        return _aggregate(together, [SOURCE, *(f"_r{i}" for i in range(width))], flags, sums, texts)

    def split(self, table: pa.Table) -> list[pa.Table]:
        """Each part's own deltas."""
        tables = []
        for number, (plan, _) in enumerate(self.parts):
            own = table.filter(pc.equal(table[SOURCE], number))
            columns = {MINUTE: own[MINUTE], ROWS: own[ROWS]}
            columns |= {each: own[f"_r{i}"] for i, each in enumerate(plan.roles)}
            columns |= {each: own[each] for each in plan.sums}
            tables.append(pa.table(columns))
        return tables


def fuse(parts: Sequence[tuple[SourcePlan, DataFrame]]) -> list[Fusion]:
    """As few aggregations as possible: sources go together unless a column's types exclude it."""
    groups: list[tuple[dict[str, str], list[tuple[SourcePlan, DataFrame]]]] = []
    for plan, rows in parts:
        kinds = {each: _kind(plan, each) for each in plan.needed}
        for known, members in groups:
            if all(known.get(each, kind) == kind for each, kind in kinds.items()):
                known |= kinds
                members.append((plan, rows))
                break
        else:
            groups.append((kinds, [(plan, rows)]))
    return [Fusion(tuple(members)) for _, members in groups]


def _aggregate(
    rows: DataFrame,
    keys: Sequence[str],
    flags: Mapping[str, str],
    sums: Mapping[str, str],
    texts: Mapping[str, State],
) -> DataFrame:
    flagged = rows.selectExpr(
        "*",
        f"{minute_sql(FITS)} AS {MINUTE}",
        *(f"COALESCE({each}, false) AS {flag}" for flag, each in flags.items()),
    )
    summed = flagged.groupBy(MINUTE, *keys).agg(
        F.expr("COUNT(1)").alias(ROWS),
        *(F.expr(each).alias(column) for column, each in sums.items()),
    )
    # What is not UTF-8 could not be told to anybody.
    readable = [
        MINUTE,
        *(each if each == SOURCE else f"MAKE_VALID_UTF8({each}) AS {each}" for each in keys),
    ]
    return _shorten(summed.selectExpr(*readable, ROWS, *sums), texts)


def _shorten(summed: DataFrame, texts: Mapping[str, State]) -> DataFrame:
    """Turn the lists of keys into the store's text, in three steps of one projection each."""
    if not texts:
        return summed
    others = [each for each in summed.columns if each not in texts]
    ordered = summed.selectExpr(*others, *(f"SORT_ARRAY({each}) AS {each}" for each in texts))
    begun = ordered.selectExpr(
        "*", *(f"{_sql.starts(state, each)} AS {each}_at" for each, state in texts.items())
    )
    return begun.selectExpr(
        *others,
        *(
            f"{_sql.pieces(state, each, starts=f'{each}_at')} AS {each}"
            for each, state in texts.items()
        ),
    )


def _complete(rows: DataFrame, types: Mapping[str, T.DataType]) -> DataFrame:
    """The rows with every column that is asked for, null where they have none, and ``_fits``."""
    there = set(rows.columns)
    missing = [
        f"CAST(NULL AS {kind.simpleString()}) AS {_sql.name(each)}"
        for each, kind in types.items()
        if each not in there
    ]
    if FITS not in there:
        missing.append(f"true AS {FITS}")
    return rows.selectExpr("*", *missing) if missing else rows


def _column(column: str, plan: SourcePlan, kind: T.DataType) -> str:
    value = _sql.name(column) if column in plan.needed else "NULL"
    return f"CAST({value} AS {kind.simpleString()}) AS {_sql.name(column)}"


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
