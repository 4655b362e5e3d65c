"""What the metrics of one or several sources ask about a row, each thing once, and its answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pyspark.sql import types as T

from batchmill.spark.input.schema import spark_type
from batchmill.spark.l1.plan import SourcePlan
from batchmill.spark.l1.states import COUNT, Listing, Measure, Total, When

BITS = 62
"""How many conditions go into one long."""


@dataclass
class Asked:
    """What all sources together ask for."""

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
        """One more source."""
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
    def words(self) -> dict[str, str]:
        """All conditions of a row, as the bits of a few numbers, by their columns."""
        conditions = enumerate(self.conditions.values())
        some = [f"IF({each}, {1 << n % BITS}L, 0L)" for n, each in conditions]
        starts = range(0, len(some), BITS)
        return {f"_b{n}": " | ".join(some[at : at + BITS]) for n, at in enumerate(starts)}

    @property
    def columns(self) -> dict[str, str]:
        """Conditions and keys of a row, by their columns."""
        return self.words | self.keys

    def masks(self, when: When) -> dict[str, int]:
        """Which bits a row that meets those conditions has, in which words."""
        places = {each: place for place, each in enumerate(self.conditions)}
        masks: dict[str, int] = {}
        for each in when:
            word, bit = divmod(places[each], BITS)
            masks[f"_b{word}"] = masks.get(f"_b{word}", 0) | 1 << bit
        return masks

    def met(self, when: When) -> str:
        """Whether a row with those words meets the conditions; there is one at least."""
        masks = self.masks(when).items()
        return " AND ".join(f"({word} & {mask}L) = {mask}L" for word, mask in masks)


def singly(rows: str, group: Sequence[str], asked: Asked) -> str:
    """What is asked about each row; every row stands for itself."""
    columns = [
        *group,
        f"1L AS {COUNT}",
        *(f"{each} AS {column}" for column, each in asked.columns.items()),
        *(f"{each.single} AS {column}" for column, each in asked.measures.items()),
    ]
    return f"SELECT {', '.join(columns)} FROM ({rows})"


def alike(rows: str, group: Sequence[str], asked: Asked) -> str:
    """The same, but rows in which all conditions and keys are the same become one."""
    columns = asked.columns
    values = {each.value: f"_v{n}" for n, each in enumerate(asked.measures.values())}
    made = [
        *group,
        *(f"{each} AS {column}" for column, each in columns.items()),
        *(f"{each} AS {column}" for each, column in values.items()),
    ]
    # From here on the slice is one partition. What lies below is compiled as one with the reading.
    rows = f"SELECT /*+ COALESCE(1) */ {', '.join(made)} FROM ({rows})"
    measures = [f"COUNT(1) AS {COUNT}"]
    measures += [
        f"{each.how}({values[each.value]}) AS {column}" for column, each in asked.measures.items()
    ]
    grouped = ", ".join([*group, *columns])
    return f"SELECT {grouped}, {', '.join(measures)} FROM ({rows}) GROUP BY {grouped}"


def barred(item: str) -> str:
    """An item of a list. Spark compiles what is below an aggregation, but not what a list collects.
    The number of the partition is not for it to foresee, so it leaves the item where it is."""
    return f"IF(SPARK_PARTITION_ID() >= 0, {item}, NULL)"


def kind_of(plan: SourcePlan, column: str) -> str:
    """What a column holds; columns of one kind go together."""
    kind = _type(plan, column)
    return "whole" if isinstance(kind, T.IntegerType | T.LongType) else kind.simpleString()


def _type(plan: SourcePlan, column: str) -> T.DataType:
    [found] = [each for each in plan.source.fields.values() if each.column == column]
    return spark_type(found.type)


def _wider(plan: SourcePlan, column: str, known: Mapping[str, T.DataType]) -> T.DataType:
    kind = _type(plan, column)
    before = known.get(column, kind)
    return before if isinstance(before, T.LongType) else kind
