"""Plans how the rows of one event type become states: every state of its metrics, each once.

A state is kept in totals or in a tally. A total is a number of a group: how many rows meet some
conditions, or the sum, maximum or minimum of a value of theirs. A tally counts rows by key, or sums
a value by label. Metrics that need the same total or tally share it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, TypeAlias

from batchmill.oal import (
    ApdexCount,
    Bucketed,
    Clamped,
    Condition,
    Count,
    DoubleSum,
    Extreme,
    Label,
    LabelSum,
    LogBucketed,
    Metric,
    Path,
    State,
    Sum,
    Tally,
)
from batchmill.sources import TIME_COLUMN, Field, SourceType

DEFAULT_APDEX_MS = 500
"""The apdex threshold T of a service that has none of its own."""
LARGEST_DOUBLE = 2.0**62
"""Doubles are summed exactly up to here; a row with a larger one is invalid."""
MOST_MS = (2**63 - 1) // 1000
"""Milliseconds that become microseconds are cut here, so that these fit 64 bits."""

Test: TypeAlias = Condition | ApdexCount
"""What a row meets or not; an ``ApdexCount`` is met by the rows that it counts."""
Where: TypeAlias = tuple[Test, ...]
"""Tests that a row must meet, all of them; none: every row counts."""
How: TypeAlias = Literal["sum", "max", "min"]
Part: TypeAlias = Literal["value", "upper", "lower", "limb1", "limb2", "limb3"]
"""Which part of a number: the value itself; the upper or lower 32 bits of a whole number, or of a
double's whole part; or 30 bits of a double's fraction."""

_MISSING = "not defined"
_PARTS: Mapping[str, tuple[Part, ...]] = {
    "int": ("value",),
    "long": ("upper", "lower"),
    "double": ("upper", "lower", "limb1", "limb2", "limb3"),
}
"""The parts that a sum is kept in, by the kind of the value: the sum of none outgrows 64 bits."""


@dataclass(frozen=True, slots=True)
class Total:
    """One number of a group."""

    how: How
    value: Path | None
    """What is summed or compared; None: the number of rows."""
    part: Part
    where: Where

    @property
    def column(self) -> str:
        """The column that holds it: the same total has the same name in every plan."""
        return _column("_s", self.how, self.value, self.part, self.where)


@dataclass(frozen=True, slots=True)
class Key:
    """What a tally counts by: the buckets of a number, or the text of a label."""

    value: Path
    width: int | None
    """The width of a bucket; None: a label."""
    log: bool = False
    """Whether buckets grow with the value, as :func:`batchmill.oal.values.log_bucket` has them."""


@dataclass(frozen=True, slots=True)
class TallyColumn:
    """Rows counted by key, or sums and counts by label."""

    key: Key
    where: Where
    coarser: int = 1
    """How many buckets of ``key`` make one bucket of this tally."""
    last: int | None = None
    """The last bucket, which takes all beyond it; the first one takes all before it."""
    summed: Path | None = None
    """The whole number that is summed by label; None: rows are counted."""

    @property
    def column(self) -> str:
        """The column that holds it."""
        width: int | str | None = self.key.width
        if self.key.width is not None:
            width = "log" if self.key.log else self.key.width * self.coarser
        return _column("_t", self.key.value, width, self.last, self.summed, self.where)


@dataclass(frozen=True)
class SourcePlan:
    """How the rows of one event type become states."""

    source: SourceType
    metrics: tuple[Metric, ...]
    apdex_ms: Mapping[str, int] = field(default_factory=dict)
    """The apdex threshold T by service name."""
    totals: dict[str, Total] = field(default_factory=dict, init=False)
    tallies: dict[str, TallyColumn] = field(default_factory=dict, init=False)
    cells: dict[str, tuple[str, ...]] = field(default_factory=dict, init=False)
    """A metric's name to the columns that hold its states, in the order of the store's cells."""

    def __post_init__(self) -> None:
        widths = _shared_widths(state for metric in self.metrics for state in metric.states)
        for metric in self.metrics:
            columns = (column for state in metric.states for column in self._add(state, widths))
            self.cells[metric.name] = tuple(columns)

    @cached_property
    def roles(self) -> tuple[str, ...]:
        """The columns that identify entities, in the order of the entity's roles."""
        roles = self.source.entity.roles.values()
        return tuple(self.source.fields[role].column for role in roles if not role.startswith("="))

    @cached_property
    def columns(self) -> frozenset[str]:
        """The columns of the fields that are read."""
        return frozenset(field.column for field in self.fields)

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        """The fields that are read, in the order of the event type."""
        read = set(map(top_column, self.paths))
        return tuple(
            field
            for field in self.source.fields.values()
            if field.required or field.column in self.roles or field.column in read
        )

    @cached_property
    def nested_doubles(self) -> tuple[Path, ...]:
        """The doubles inside structs that are read."""
        return tuple(
            path for path in self.paths if path.type.kind == "double" and len(path.parts) > 1
        )

    @cached_property
    def paths(self) -> tuple[Path, ...]:
        """What the metrics read of a row."""
        states = (state for metric in self.metrics for state in metric.states)
        return tuple(dict.fromkeys(path for state in states for path in _paths(state)))

    @cached_property
    def definitions(self) -> dict[str, str]:
        """The definition of each metric by its name."""
        return {metric.name: metric.text for metric in self.metrics}

    @cached_property
    def types(self) -> dict[str, str]:
        """The type of each value that is read, by its path."""
        return {path.text: str(path.type) for path in self.paths}

    @cached_property
    def thresholds(self) -> dict[str, int]:
        """The apdex thresholds that make a difference: none if no metric is an apdex."""
        states = (state for metric in self.metrics for state in metric.states)
        is_apdex = any(isinstance(state, ApdexCount) for state in states)
        return dict(self.apdex_ms) if is_apdex else {}

    def _add(self, state: State, widths: Mapping[Path, tuple[int, ...]]) -> tuple[str, ...]:
        """The columns that hold a state."""
        if isinstance(state, Tally | LabelSum):
            tally = _tally(state, widths)
            self.tallies[tally.column] = tally
            return (tally.column,)
        totals = _totals(state)
        self.totals.update((total.column, total) for total in totals)
        return tuple(total.column for total in totals)


def top_column(path: Path) -> str:
    """The column of a row in which a path begins."""
    first = path.parts[0]
    assert isinstance(first, str)
    return f"{first}_" if first == TIME_COLUMN else first


def _totals(state: Count | ApdexCount | Sum | DoubleSum | Extreme) -> list[Total]:
    match state:
        case Count():
            return [Total("sum", None, "value", state.where)]
        case ApdexCount():
            # Without its own conditions, it is evaluated once for all.
            return [Total("sum", None, "value", (*state.where, replace(state, where=())))]
        case Extreme():
            return [Total(state.which, state.value, "value", state.where)]
        case Sum() | DoubleSum():
            parts = _PARTS[state.value.type.kind]
            return [Total("sum", state.value, part, state.where) for part in parts]


def _tally(state: Tally | LabelSum, widths: Mapping[Path, tuple[int, ...]]) -> TallyColumn:
    if isinstance(state, LabelSum):
        return TallyColumn(Key(state.label, None), state.where, summed=state.value)
    if isinstance(state.key, Label):
        return TallyColumn(Key(state.key.value, None), state.where)
    if isinstance(state.key, LogBucketed):
        return TallyColumn(Key(state.key.value, 1, log=True), state.where)
    value, width = state.key.value, _width(state.key)
    finest = next(finer for finer in widths[value] if width % finer == 0)
    last = state.key.steps if isinstance(state.key, Clamped) else None
    # Rounded toward zero twice is the same as once.
    return TallyColumn(Key(value, finest), state.where, width // finest, last)


def _shared_widths(states: Iterable[State]) -> dict[Path, tuple[int, ...]]:
    """By value, the widths of buckets from which the buckets of all its tallies can be filled."""
    widths: dict[Path, set[int]] = {}
    for state in states:
        if isinstance(state, Tally) and not isinstance(state.key, Label | LogBucketed):
            widths.setdefault(state.key.value, set()).add(_width(state.key))
    shared = {}
    for value, all_widths in widths.items():
        chosen: list[int] = []
        for width in sorted(all_widths):
            if all(width % finer for finer in chosen):
                chosen.append(width)
        shared[value] = tuple(chosen)
    return shared


def _width(key: Bucketed | Clamped) -> int:
    return key.precision if isinstance(key, Bucketed) else key.step


def _paths(state: State) -> Iterable[Path]:
    yield from (condition.path for condition in state.where)
    if isinstance(state, Tally):
        yield state.key.value
    for attribute in ("value", "label", "status", "name"):
        path = getattr(state, attribute, None)
        if isinstance(path, Path):
            yield path


def _column(kind: str, *content: object) -> str:
    """A column's name, derived from what it holds by the texts of the metric language.

    No column of an event type begins with an underscore.
    """
    text = "|".join(_text(part) for part in content)
    return f"{kind}_{hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()[:16]}"


def _text(part: object) -> str:
    if isinstance(part, ApdexCount):
        return f"{part.which}({part.value},{part.status},{part.name})"
    if isinstance(part, tuple):
        return "&".join(sorted(map(_text, part)))
    return str(part)


def differences(ours: Mapping[str, str], theirs: Mapping[str, str], what: str = "") -> list[str]:
    """In words, how the definitions of two sides differ; empty: they are equal."""
    return [
        f"{what}{name}: {theirs.get(name, _MISSING)}, here {ours.get(name, _MISSING)}"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]
