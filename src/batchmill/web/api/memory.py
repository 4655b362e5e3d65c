"""What was worked out before, by what it was worked out of.

Nobody has to tell when something changes. Finished figures are kept with the hash of the row that
they were worked out of, and merged tallies by the hash of the texts that were merged: what late
rows change has another one. Threads may share it; two may work out the same at once, and either
result is right.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import islice
from typing import Any, Protocol

MOST_ROWS = 131_072
"""Of one kind; of 500 services that are the hours of ten days."""
MOST_KINDS = 6
MOST_TALLIES = 2_048

Known = dict[tuple[int, int], tuple[int, tuple[Any, ...]]]
"""By bucket and entity: the hash of the row that the figures were worked out of, and they."""


class Plan(Protocol):
    """What knows how to read a tally."""

    def states(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """The states of a metric, from its cells."""
        ...


class Memory:
    """Bounded: when it is full, the older half of it is forgotten."""

    def __init__(self) -> None:
        self._rows: dict[Hashable, Known] = {}
        self._tallies: dict[int, dict[int, int]] = {}

    def rows(self, mark: Hashable, minutes: int) -> Known:
        """The figures of rows: of the same metrics, and buckets of so many minutes.

        What the caller puts into it is counted when the next one asks.
        """
        for each in list(self._rows.values()):
            if len(each) > MOST_ROWS:
                forget_half(each)
        if len(self._rows) > MOST_KINDS:
            self._rows = {}
        return self._rows.setdefault((mark, minutes), {})

    def tally(self, plan: Plan, steady: Sequence[str], others: Sequence[str]) -> dict[int, int]:
        """The tally of all those texts together; the ``steady`` ones will come again."""
        found = self._steady(plan, tuple(steady)) if steady else {}
        if not others:
            return found
        merged = dict(found)
        for number, count in plan.states((",".join(others),))[0].items():
            merged[number] = merged.get(number, 0) + count
        return merged

    def _steady(self, plan: Plan, texts: tuple[str, ...]) -> dict[int, int]:
        mark = hash(texts)
        found = self._tallies.get(mark)
        if found is None:
            if len(self._tallies) >= MOST_TALLIES:
                forget_half(self._tallies)
            found = self._tallies[mark] = plan.states((",".join(texts),))[0]
        return found


def forget_half(known: dict[Any, Any]) -> None:
    """Forget the older half; another thread may be doing the same."""
    for key in islice(list(known), len(known) // 2):
        known.pop(key, None)
