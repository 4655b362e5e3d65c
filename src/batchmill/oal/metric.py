"""A metric: what it measures, the states it needs, and its value; and its description."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from batchmill.oal.functions import FUNCTIONS, Arg, Value
from batchmill.oal.model import Condition, Path, Position, all_of, quote
from batchmill.oal.states import LabelSum, State, Tally
from batchmill.wording import count_of

NOWHERE = Position("<made>", 0, 0)
"""The position of a metric that is not from a script."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric. Equal to another if name and definition are, wherever they are defined."""

    name: str
    source: str
    """The event type that it is computed from."""
    value: Path | None
    """What is measured; None stands for ``*``, the row itself."""
    filters: tuple[Condition, ...] = field(compare=False)
    """The conditions on a row, as they were written; all must hold."""
    function: str
    args: tuple[Arg, ...] = ()
    decorator: str | None = None
    where: Position = field(default=NOWHERE, compare=False)
    """Where it is defined."""
    text: str = field(init=False)
    """The definition in canonical form, without the name: the same text is the same metric."""
    states: tuple[State, ...] = field(init=False, compare=False)
    """The states that its rows are reduced to, in the order that :meth:`values` takes them."""
    labelled: bool = field(init=False, compare=False)
    """Whether its value is a dict with one number for each label."""

    def __post_init__(self) -> None:
        function = FUNCTIONS[self.function]
        where = all_of(self.filters)
        object.__setattr__(self, "text", self._text())
        object.__setattr__(self, "states", function.states(where, self.value, self.args))
        object.__setattr__(self, "labelled", function.labelled)

    def values(self, states: Sequence[Any], minutes: int) -> Value:
        """The final value, from the merged states of one entity and bucket.

        ``minutes`` is how long the bucket is: 1, 60 or 1440. None: no row matched.
        """
        return FUNCTIONS[self.function].finish(self.args, states, minutes)

    @property
    def definition(self) -> str:
        """The whole statement, as a script would have it."""
        return f"{self.name} = {self.text};"

    def _text(self) -> str:
        measured = f"{self.source}.*"
        if self.value is not None:
            # A cast stands in front of the source: (str->long)Service.tag["k"].
            plain = Path(self.value.parts, self.value.type).text
            cast = f"(str->{self.value.cast})" if self.value.cast else ""
            measured = f"{cast}{self.source}.{plain}"
        filters = "".join(f".filter({condition.text})" for condition in all_of(self.filters))
        args = ",".join(map(str, self.args))
        decorator = f".decorator({quote(self.decorator)})" if self.decorator is not None else ""
        return f"from({measured}){filters}.{self.function}({args}){decorator}"


@dataclass(frozen=True, slots=True)
class Description:
    """A metric in words, and what it costs."""

    metric: str
    source: str
    function: str
    """The call, such as ``percentile2(10)``."""
    measured: str
    """The path that is measured, or ``*``."""
    filters: tuple[str, ...]
    decorator: str | None
    states: int
    """How many states its rows are reduced to."""
    shared: int
    """How many of them another metric of the set needs too: those cost nothing more."""
    needs_map: bool
    """Whether a state is a map, which costs more than a number."""

    @property
    def cost(self) -> str:
        """The cost in words."""
        shared = f", {self.shared} shared" if self.shared else ""
        return f"{count_of(self.states, 'state')}{shared}{', map' * self.needs_map}"


def describe(metrics: Collection[Metric]) -> tuple[Description, ...]:
    """A description of each metric of a set, in order."""
    users: Counter[tuple[str, State]] = Counter()
    for metric in metrics:
        users.update({(metric.source, state) for state in metric.states})
    return tuple(_description(metric, users) for metric in metrics)


def _description(metric: Metric, users: Counter[tuple[str, State]]) -> Description:
    args = ", ".join(map(str, metric.args))
    return Description(
        metric=metric.name,
        source=metric.source,
        function=f"{metric.function}({args})",
        measured=metric.value.text if metric.value is not None else "*",
        filters=tuple(condition.text for condition in metric.filters),
        decorator=metric.decorator,
        states=len(set(metric.states)),
        shared=sum(users[metric.source, state] > 1 for state in set(metric.states)),
        needs_map=any(isinstance(state, (Tally, LabelSum)) for state in metric.states),
    )
