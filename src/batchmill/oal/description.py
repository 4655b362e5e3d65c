"""What metrics are and what they cost, as rows of a table."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from batchmill.oal.metric import Metric
from batchmill.oal.script import MetricSet
from batchmill.oal.states import LabelSum, State, Tally


@dataclass(frozen=True, slots=True)
class Description:
    """A metric in words, and its cost."""

    metric: str
    source: str
    function: str
    """The call as it is written, such as ``percentile2(10)``."""
    measured: str
    """The path that is measured, or ``*``."""
    filters: tuple[str, ...]
    decorator: str | None
    states: int
    """How many states its rows are reduced to."""
    shared: int
    """How many of them another metric of the set needs too, so that they cost nothing more."""
    needs_map: bool
    """Whether a state is a map, which is dearer than a number."""

    @property
    def cost(self) -> str:
        """The cost in words."""
        shared = f", {self.shared} shared" if self.shared else ""
        return f"{self.states} state{'s' * (self.states != 1)}{shared}{', map' * self.needs_map}"


def describe(metrics: MetricSet) -> tuple[Description, ...]:
    """A row for each metric, in order."""
    users: Counter[tuple[str, State]] = Counter()
    for each in metrics:
        users.update({(each.source, state) for state in each.states})
    return tuple(_described(each, users) for each in metrics)


def _described(metric: Metric, users: Counter[tuple[str, State]]) -> Description:
    args = ", ".join(str(each) for each in metric.args)
    return Description(
        metric=metric.name,
        source=metric.source,
        function=f"{metric.function}({args})",
        measured=metric.value.text if metric.value is not None else "*",
        filters=tuple(each.text for each in metric.filters),
        decorator=metric.decorator,
        states=len(set(metric.states)),
        shared=sum(users[metric.source, state] > 1 for state in set(metric.states)),
        needs_map=any(isinstance(state, (Tally, LabelSum)) for state in metric.states),
    )
