"""L1: the rows of one source become mergeable deltas, one per entity and minute.

One aggregation for all metrics of the source; what two metrics both need is computed once. What is
computed is told by :mod:`._states`; here it becomes one query.

Where a source has tallies and its segments are many, they are cut into slices, one for each core:
a slice is one task from its files to its deltas, nothing is shuffled, and the few deltas that two
slices have in common are merged later as any others. Rows that are alike are added up first: that
runs as compiled code, which lists of keys do not. Measured on 10 million events: see the docs.

Where a batch is small, planning a query takes longer than running it. So the rows of many small
sources are put into one aggregation: what one source needs is computed for the rows of the others
as well, and left alone. For the same reason the whole query is one text: a DataFrame that is built
step by step is analysed at every step.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql import types as T

from batchmill.spark import _sql
from batchmill.spark._plan import MINUTE, ROWS, SourcePlan, minute_sql
from batchmill.spark._reader import FITS
from batchmill.spark._schema import spark_type
from batchmill.spark._states import COUNT, COUNT_BITS, FEW_BITS, Listing, Measure, Total, When
from batchmill.spark._tallies import texts

SOURCE = "_source"
_BITS = 62
"""How many conditions go into one long."""


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


@dataclass(frozen=True)
class Fusion:
    """Sources whose columns go together, aggregated as one."""

    parts: Parts
    most: int | None = None
    """How many rows there are at most, if that is known."""

    def tables(self) -> list[pa.Table]:
        """The deltas of each part: minute, roles, number of rows, then what the plan's states need.

        Rows that do not fit come out with the minute null, to be counted.
        """
        slices = self._slices()
        if not slices:
            return self._tables(self.parts, alike=False)
        # What comes after Spark is then done for one slice beside the other, too.
        with ThreadPoolExecutor(len(slices), "batchmill-slice") as pool:
            made = list(pool.map(lambda parts: self._tables(parts, alike=True), slices))
        return [pa.concat_tables(each) for each in zip(*made, strict=True)]

    def _slices(self) -> list[Parts]:
        if len(self.parts) > 1:
            return []
        ((plan, rows),) = self.parts
        return [((plan, replace(rows, frame=each)),) for each in rows.slices]

    def _tables(self, parts: Parts, *, alike: bool) -> list[pa.Table]:
        wanted = _wanted(parts, 1 if not alike else self.most)
        session = parts[0][1].frame.sparkSession
        names: dict[int, str] = {}
        try:
            for _, rows in parts:
                if id(rows.frame) not in names:
                    names[id(rows.frame)] = f"batchmill_{uuid.uuid4().hex}"
                    rows.frame.createOrReplaceTempView(names[id(rows.frame)])
            table = session.sql(_query(parts, names, wanted, alike=alike)).toArrow()
        finally:
            for name in names.values():
                session.catalog.dropTempView(name)
        return [
            _own(
                table if len(parts) == 1 else table.filter(pc.equal(table[SOURCE], number)),
                plan,
                wanted,
            )
            for number, (plan, _) in enumerate(parts)
        ]


def _own(table: pa.Table, plan: SourcePlan, wanted: _Wanted) -> pa.Table:
    """One part's deltas."""
    columns = {MINUTE: table[MINUTE], ROWS: table[ROWS]}
    columns |= {each: table[f"_r{i}"] for i, each in enumerate(plan.roles)}
    columns |= {each: table[each] for each in plan.recipe.totals}
    columns |= texts(table, plan.recipe.tallies, wanted.bits)
    return pa.table(columns)


def fuse(
    parts: Sequence[tuple[SourcePlan, Rows]], *, together: bool, most: int | None = None
) -> list[Fusion]:
    """Who is aggregated with whom: as many as possible ``together``, or each by itself. ``most`` is
    how many rows there are at most, if that is known.

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


@dataclass
class _Wanted:
    """What all parts together ask for, each thing once."""

    most: int | None
    """How many rows a row may stand for."""
    types: dict[str, T.DataType] = field(default_factory=dict)
    conditions: dict[str, str] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    measures: dict[str, Measure] = field(default_factory=dict)
    totals: dict[str, Total] = field(default_factory=dict)
    lists: dict[str, Listing] = field(default_factory=dict)
    whens: dict[str, dict[When, None]] = field(default_factory=dict)
    """A list to the conditions of its tallies."""

    def add(self, plan: SourcePlan) -> None:
        recipe = plan.recipe
        self.types |= {each: _wider(plan, each, self.types) for each in plan.needed}
        self.conditions |= recipe.conditions
        self.keys |= recipe.keys
        self.measures |= recipe.measures
        self.totals |= recipe.totals
        for each in recipe.tallies.values():
            self.lists[each.listing.name] = each.listing
            self.whens.setdefault(each.listing.name, {})[each.when] = None

    @property
    def words(self) -> list[str]:
        """All conditions of a row, as the bits of a few numbers."""
        conditions = enumerate(self.conditions.values())
        some = [f"IF({each}, {1 << n % _BITS}L, 0L)" for n, each in conditions]
        return [" | ".join(some[at : at + _BITS]) for at in range(0, len(some), _BITS)]

    def met(self, when: When) -> str:
        """Whether a row with those words meets the conditions; there is one at least."""
        places = {each: place for place, each in enumerate(self.conditions)}
        masks: dict[int, int] = {}
        for each in when:
            word, bit = divmod(places[each], _BITS)
            masks[word] = masks.get(word, 0) | 1 << bit
        return " AND ".join(f"(_b{word} & {mask}L) = {mask}L" for word, mask in masks.items())

    @property
    def bits(self) -> dict[str, dict[When, tuple[str, int]]]:
        """A list to where the bit of some conditions of its tallies is: column, place. Nothing for
        a list all of whose tallies ask for the same. The column may be the list itself."""
        made = {}
        for name, whens in self.whens.items():
            asked = [each for each in whens if each]
            few = self.most is not None and self.most < 1 << FEW_BITS
            if few and self.lists[name].packed and len(asked) <= COUNT_BITS - FEW_BITS:
                places = [(name, FEW_BITS + n) for n, _ in enumerate(asked)]
            else:
                places = [(f"{name}_{n // _BITS}", n % _BITS) for n, _ in enumerate(asked)]
            if len(whens) > 1:
                made[name] = dict(zip(asked, places, strict=True))
        return made


def _wanted(parts: Parts, most: int | None) -> _Wanted:
    wanted = _Wanted(most)
    for plan, _ in parts:
        wanted.add(plan)
    return wanted


def _query(parts: Parts, views: Mapping[int, str], wanted: _Wanted, *, alike: bool) -> str:
    """The deltas of the parts; with rows that are ``alike`` added up first, or each by itself."""
    width = max(len(plan.roles) for plan, _ in parts)
    selects = [
        _select(number, plan, rows, views[id(rows.frame)], wanted.types, width)
        for number, (plan, rows) in enumerate(parts)
    ]
    # With one source the column is left out: it would be one more to hash for every row.
    entity = [*([] if len(parts) == 1 else [SOURCE]), *(f"_r{i}" for i in range(width))]
    rows = f"SELECT *, {minute_sql(FITS)} AS {MINUTE} FROM ({' UNION ALL '.join(selects)})"
    group = [MINUTE, *entity]
    query = _alike(rows, group, wanted) if alike else _singly(rows, group, wanted)
    query = _aggregate(query, group, wanted)
    # What is not UTF-8 could not be told to anybody.
    valid = [each if each == SOURCE else f"MAKE_VALID_UTF8({each}) AS {each}" for each in entity]
    bits = [each for each in _bit_columns(wanted) if each not in wanted.lists]
    columns = [MINUTE, ROWS, *valid, *wanted.totals, *wanted.lists, *bits]
    return f"SELECT {', '.join(columns)} FROM ({query})"


def _asked(wanted: _Wanted) -> dict[str, str]:
    """Conditions and keys of a row, by their columns."""
    return {f"_b{number}": each for number, each in enumerate(wanted.words)} | wanted.keys


def _singly(rows: str, group: Sequence[str], wanted: _Wanted) -> str:
    """Every row stands for itself."""
    columns = [
        *group,
        f"1L AS {COUNT}",
        *(f"{each} AS {column}" for column, each in _asked(wanted).items()),
        *(f"{each.single} AS {column}" for column, each in wanted.measures.items()),
    ]
    return f"SELECT {', '.join(columns)} FROM ({rows})"


def _alike(rows: str, group: Sequence[str], wanted: _Wanted) -> str:
    """Rows in which all conditions and keys are the same become one."""
    asked = _asked(wanted)
    values = {each.value: f"_v{n}" for n, each in enumerate(wanted.measures.values())}
    columns = [
        *group,
        *(f"{each} AS {column}" for column, each in asked.items()),
        *(f"{each} AS {column}" for each, column in values.items()),
    ]
    # From here on the slice is one partition. What lies below is compiled as one with the reading.
    query = f"SELECT /*+ COALESCE(1) */ {', '.join(columns)} FROM ({rows})"
    measures = [f"COUNT(1) AS {COUNT}"]
    measures += [
        f"{each.how}({values[each.value]}) AS {column}" for column, each in wanted.measures.items()
    ]
    grouped = ", ".join([*group, *asked])
    return f"SELECT {grouped}, {', '.join(measures)} FROM ({query}) GROUP BY {grouped}"


def _aggregate(rows: str, group: Sequence[str], wanted: _Wanted) -> str:
    """The states of each group; tallies as lists."""
    items = {}
    for column, each in wanted.lists.items():
        there, whens = each.there, wanted.whens[column]
        if () not in whens:
            there += f" AND ({' OR '.join(wanted.met(when) for when in whens)})"
        bits = _bit_columns(wanted, column)
        inside = f" + ({bits.pop(column)})" if column in bits else ""
        items[column] = f"IF({there}, {each.item}{inside}, NULL)"
        for name, found in bits.items():
            items[name] = f"IF({there}, {found}, NULL)"
    if items:
        # Spark compiles what is below an aggregation, but not what a list collects. The number of
        # the partition is not for it to foresee, so it leaves the items where they are.
        made = [
            f"IF(SPARK_PARTITION_ID() >= 0, {item}, NULL) AS {column}"
            for column, item in items.items()
        ]
        rows = f"SELECT *, {', '.join(made)} FROM ({rows})"
    summed = [f"SUM({COUNT}) AS {ROWS}"]
    for column, total in wanted.totals.items():
        # The sum of nothing is nothing, but there are none of something: 0.
        other = "0L" if total.what == COUNT else "NULL"
        value = f"IF({wanted.met(total.when)}, {total.what}, {other})" if total.when else total.what
        summed.append(f"{total.how}({value}) AS {column}")
    summed += [f"COLLECT_LIST({column}) AS {column}" for column in items]
    grouped = ", ".join(group)
    return f"SELECT {grouped}, {', '.join(summed)} FROM ({rows}) GROUP BY {grouped}"


def _bit_columns(wanted: _Wanted, of: str | None = None) -> dict[str, str]:
    """The columns that say which conditions the items of a list meet, or of all lists."""
    columns: dict[str, list[str]] = {}
    for name, bits in wanted.bits.items():
        for when, (column, bit) in bits.items() if of in (None, name) else ():
            columns.setdefault(column, []).append(f"IF({wanted.met(when)}, {1 << bit}L, 0L)")
    return {column: " | ".join(each) for column, each in columns.items()}


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
