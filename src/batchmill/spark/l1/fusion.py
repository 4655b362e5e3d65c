"""L1: the rows of one source become mergeable deltas, one per entity and minute.

One aggregation for all metrics of the source; what two metrics both need is computed once. What is
computed is told by :mod:`.states`; here it becomes one query.

Where a source has tallies and its segments are many, they are cut into slices, one for each core:
a slice is one task from its files to its groups, nothing is shuffled, and the few deltas that two
slices have in common are merged later as any others. Rows that are alike are added up first: that
runs as compiled code, which lists of keys do not. States are then made by Spark (:mod:`.summed`),
or, where there are many, by the driver (:mod:`.listed`). Measured on 10 million events: see the
docs.

Where a batch is small, planning a query takes longer than running it. So the rows of many small
sources are put into one aggregation: what one source needs is computed for the rows of the others
as well, and left alone. For the same reason the whole query is one text: a DataFrame that is built
step by step is analysed at every step.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql import types as T

from batchmill.spark.input.reader import FITS
from batchmill.spark.l1 import listed
from batchmill.spark.l1 import sql as sql_text
from batchmill.spark.l1 import summed as summed_module
from batchmill.spark.l1.asked import Asked, alike, kind_of, singly
from batchmill.spark.l1.plan import MINUTE, SourcePlan, minute_sql

SOURCE = "_source"


@dataclass(frozen=True)
class Rows:
    """Rows of a source: some of a frame's, under the names of the catalog."""

    frame: DataFrame
    columns: tuple[str, ...] = ()
    """As SQL, each with its name at the end; none stands for all columns of the frame."""
    where: str = "true"
    slices: tuple[DataFrame, ...] = ()
    """The same rows in several frames, each for one task, if they can be had so."""

    @property
    def names(self) -> frozenset[str]:
        """The columns that there are."""
        if not self.columns:
            return frozenset(self.frame.columns)
        return frozenset(each.rsplit(" AS ", 1)[-1] for each in self.columns)

    def sql(self, view: str) -> str:
        """The rows as a query on a view of the frame."""
        return f"SELECT {', '.join(self.columns) or '*'} FROM {view} WHERE {self.where}"


Parts: TypeAlias = tuple[tuple[SourcePlan, Rows], ...]
Told: TypeAlias = Callable[[str, Sequence[str], Asked], str]
"""How rows come to what is asked about them: each by itself, or those that are alike as one."""


@dataclass(frozen=True)
class Fusion:
    """Sources whose columns go together, aggregated as one."""

    parts: Parts
    most: int | None = None
    """How many rows of segments there are at most, if that is known."""

    def tables(self) -> list[pa.Table]:
        """The deltas of each part: minute, roles, number of rows, then what the plan's states need.

        Rows that do not fit come out with the minute null, to be counted.
        """
        asked = Asked()
        for plan, _ in self.parts:
            asked.add(plan)
        summed = summed_module.suits(asked, self.most)
        slices = self._slices() if summed or listed.fits(asked, self.most) else []
        if not slices:
            return self._tables(self.parts, asked, summed_module, singly)
        way = summed_module if summed else listed
        # What comes after Spark is then done for one slice beside the other, too.
        with ThreadPoolExecutor(len(slices), "batchmill-slice") as pool:
            made = list(pool.map(lambda parts: self._tables(parts, asked, way, alike), slices))
        return [pa.concat_tables(each) for each in zip(*made, strict=True)]

    def _slices(self) -> list[Parts]:
        if len(self.parts) > 1:
            return []
        ((plan, rows),) = self.parts
        return [((plan, replace(rows, frame=each)),) for each in rows.slices]

    def _tables(self, parts: Parts, asked: Asked, way: ModuleType, told: Told) -> list[pa.Table]:
        session = parts[0][1].frame.sparkSession
        names: dict[int, str] = {}
        try:
            for _, rows in parts:
                if id(rows.frame) not in names:
                    names[id(rows.frame)] = f"batchmill_{uuid.uuid4().hex}"
                    rows.frame.createOrReplaceTempView(names[id(rows.frame)])
            table = session.sql(_query(parts, names, asked, way, told)).toArrow()
        finally:
            for name in names.values():
                session.catalog.dropTempView(name)
        made = []
        for number, (plan, _) in enumerate(parts):
            own = table if len(parts) == 1 else table.filter(pc.equal(table[SOURCE], number))
            columns = {MINUTE: own[MINUTE]}
            columns |= {each: own[f"_r{i}"] for i, each in enumerate(plan.roles)}
            made.append(pa.table(columns | way.states(own, plan.recipe, asked)))
        return made


def fuse(
    parts: Sequence[tuple[SourcePlan, Rows]], *, together: bool, most: int | None = None
) -> list[Fusion]:
    """Who is aggregated with whom: as many as possible ``together``, or each by itself. ``most`` is
    how many rows of segments there are at most, if that is known.

    A column that two sources have with types that exclude each other keeps them apart.
    """
    groups: list[tuple[dict[str, str], list[tuple[SourcePlan, Rows]]]] = []
    for plan, rows in parts:
        kinds = {each: kind_of(plan, each) for each in plan.needed}
        for known, members in groups if together else ():
            if all(known.get(each, kind) == kind for each, kind in kinds.items()):
                known |= kinds
                members.append((plan, rows))
                break
        else:
            groups.append((kinds, [(plan, rows)]))
    return [Fusion(tuple(members), most) for _, members in groups]


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
    roles = [sql_text.name(each) if each in there else "NULL" for each in plan.roles]
    roles += ["NULL"] * (width - len(roles))
    values = {
        each: sql_text.name(each) if each in plan.needed and each in there else "NULL"
        for each in types
    }
    columns = [
        f"{number} AS {SOURCE}",
        "time",
        f"{FITS if FITS in there else 'true'} AS {FITS}",
        *(f"CAST({each} AS STRING) AS _r{i}" for i, each in enumerate(roles)),
        *(
            f"CAST({value} AS {types[each].simpleString()}) AS {sql_text.name(each)}"
            for each, value in values.items()
        ),
    ]
    return f"SELECT {', '.join(columns)} FROM ({rows.sql(view)})"


def _query(
    parts: Parts, views: Mapping[int, str], asked: Asked, way: ModuleType, told: Told
) -> str:
    """The deltas of the parts, or what the driver makes them of."""
    width = max(len(plan.roles) for plan, _ in parts)
    selects = [
        _select(number, plan, rows, views[id(rows.frame)], asked.types, width)
        for number, (plan, rows) in enumerate(parts)
    ]
    # With one source the column is left out: it would be one more to hash for every row.
    entity = [*([] if len(parts) == 1 else [SOURCE]), *(f"_r{i}" for i in range(width))]
    rows = f"SELECT *, {minute_sql(FITS)} AS {MINUTE} FROM ({' UNION ALL '.join(selects)})"
    group = [MINUTE, *entity]
    query = way.query(told(rows, group, asked), group, asked)
    # What is not UTF-8 could not be told to anybody.
    valid = [each if each == SOURCE else f"MAKE_VALID_UTF8({each}) AS {each}" for each in entity]
    return f"SELECT {', '.join([MINUTE, *valid, *way.columns(asked)])} FROM ({query})"
