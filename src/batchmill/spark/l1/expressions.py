"""The SQL of rows: the conditions, keys and measures of one or several sources, each once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pyspark.sql import types as T

from batchmill.spark.input.reader import spark_type
from batchmill.spark.l1.plan import COUNT, Listing, Measure, SourcePlan, Total, When

BITS = 62
"""How many conditions go into one long."""


@dataclass
class RowExpressions:
    """What all sources of a query need from a row, and of groups of rows."""

    types: dict[str, T.DataType] = field(default_factory=dict)
    """The columns that are read."""
    conditions: dict[str, str] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    measures: dict[str, Measure] = field(default_factory=dict)
    totals: dict[str, Total] = field(default_factory=dict)
    lists: dict[str, Listing] = field(default_factory=dict)
    whens: dict[str, dict[When, None]] = field(default_factory=dict)
    """A list to the conditions of its tallies."""

    def add(self, plan: SourcePlan) -> None:
        """Add what one more source needs."""
        recipe = plan.recipe
        self.types |= {column: _wider(plan, column, self.types) for column in plan.needed}
        self.conditions |= recipe.conditions
        self.keys |= recipe.keys
        self.measures |= recipe.measures
        self.totals |= recipe.totals
        for tally in recipe.tallies.values():
            self.lists[tally.listing.name] = tally.listing
            self.whens.setdefault(tally.listing.name, {})[tally.when] = None

    @property
    def words(self) -> dict[str, str]:
        """Columns of a few longs whose bits are the conditions of a row."""
        conditions = enumerate(self.conditions.values())
        bits = [f"IF({condition}, {1 << n % BITS}L, 0L)" for n, condition in conditions]
        starts = range(0, len(bits), BITS)
        return {f"_b{n}": " | ".join(bits[at : at + BITS]) for n, at in enumerate(starts)}

    @property
    def columns(self) -> dict[str, str]:
        """Columns of the conditions and keys of a row."""
        return self.words | self.keys

    def masks(self, when: When) -> dict[str, int]:
        """By word, the bits of a row that meets the conditions."""
        places = {name: place for place, name in enumerate(self.conditions)}
        masks: dict[str, int] = {}
        for name in when:
            word, bit = divmod(places[name], BITS)
            masks[f"_b{word}"] = masks.get(f"_b{word}", 0) | 1 << bit
        return masks

    def met(self, when: When) -> str:
        """SQL: whether a row with those words meets the conditions; there is at least one."""
        masks = self.masks(when).items()
        return " AND ".join(f"({word} & {mask}L) = {mask}L" for word, mask in masks)


def single_rows(rows: str, group: Sequence[str], needs: RowExpressions) -> str:
    """A query of what is needed from each row; every row stands for itself."""
    columns = [
        *group,
        f"1L AS {COUNT}",
        *(f"{text} AS {column}" for column, text in needs.columns.items()),
        *(f"{measure.single} AS {column}" for column, measure in needs.measures.items()),
    ]
    return f"SELECT {', '.join(columns)} FROM ({rows})"


def sliced_rows(rows: str, group: Sequence[str], needs: RowExpressions) -> str:
    """The same as :func:`grouped_rows`, in one task."""
    # From here on the slice is one partition. Spark compiles what is below together with the scan.
    return grouped_rows(rows, group, needs, hint="/*+ COALESCE(1) */ ")


def grouped_rows(rows: str, group: Sequence[str], needs: RowExpressions, hint: str = "") -> str:
    """What is needed from rows; those whose conditions and keys are all equal become one row."""
    columns = needs.columns
    values = {measure.value: f"_v{n}" for n, measure in enumerate(needs.measures.values())}
    selected = [
        *group,
        *(f"{text} AS {column}" for column, text in columns.items()),
        *(f"{value} AS {column}" for value, column in values.items()),
    ]
    rows = f"SELECT {hint}{', '.join(selected)} FROM ({rows})"
    measures = [f"COUNT(1) AS {COUNT}"]
    measures += [
        f"{measure.how}({values[measure.value]}) AS {column}"
        for column, measure in needs.measures.items()
    ]
    grouped = ", ".join([*group, *columns])
    return f"SELECT {grouped}, {', '.join(measures)} FROM ({rows}) GROUP BY {grouped}"


def codegen_barrier(item: str) -> str:
    """Keep Catalyst from moving a list's item into the list's aggregation.

    Spark compiles what is below an aggregation, but not what COLLECT_LIST collects. It cannot
    evaluate the number of the partition in advance, so the item stays below.
    """
    return f"IF(SPARK_PARTITION_ID() >= 0, {item}, NULL)"


def column_kind(plan: SourcePlan, column: str) -> str:
    """The kind of a column; columns of one kind can be read as one."""
    kind = _type(plan, column)
    return "whole" if isinstance(kind, T.IntegerType | T.LongType) else kind.simpleString()


def _type(plan: SourcePlan, column: str) -> T.DataType:
    [declared] = [field for field in plan.source.fields.values() if field.column == column]
    return spark_type(declared.type)


def _wider(plan: SourcePlan, column: str, known: Mapping[str, T.DataType]) -> T.DataType:
    kind = _type(plan, column)
    before = known.get(column, kind)
    return before if isinstance(before, T.LongType) else kind
