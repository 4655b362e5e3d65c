"""Regular expressions that cannot run away: as RE2 does it, without ever going back.

Understood is what PromQL's matchers are mostly made of: characters, classes, groups, ``|`` and the
repeats ``* + ? {m,n}``; ``(?i)`` at the start. A match is always one of the whole text. All that a
text could be in is followed at once, so the time grows with its length and no faster.
"""

from __future__ import annotations

from batchmill.web.errors import BadQuestion
from batchmill.web.promql.regex_parser import Parser, States

LONGEST = 16_384
"""Characters of an expression: Grafana joins all chosen values by ``|``."""
MOST_STEPS = 5_000_000
"""How much work the texts of one question may take."""
_MOST_SETS = 2_000


class Regex:
    """Matches whole texts; :class:`BadQuestion` if the expression is not understood."""

    def __init__(self, text: str) -> None:
        if len(text) > LONGEST:
            raise BadQuestion(f"a regular expression has more than {LONGEST:,} characters")
        self._folded = text.startswith("(?i)")
        states = States(self._folded)
        start, end = Parser(text[4:] if self._folded else text, states).whole()
        self._edges, self._free = states.edges, states.free
        self._end = end
        self._steps = 0
        self._sets: dict[frozenset[int], int] = {}
        self._moves: list[dict[str, int]] = []
        self._members: list[frozenset[int]] = []
        self._start = frozenset(self._closed([start]))

    def matches(self, text: str) -> bool:
        """Whether the whole text matches."""
        if self._folded:
            text = text.lower()
        if len(self._members) > _MOST_SETS:
            self._sets, self._moves, self._members = {}, [], []
        here = self._number(self._start)
        for char in text:
            there = self._moves[here].get(char)
            if there is None:
                there = self._moves[here][char] = self._number(self._moved(here, char))
            here = there
        return self._end in self._members[here]

    def _number(self, states: frozenset[int]) -> int:
        number = self._sets.get(states)
        if number is None:
            number = self._sets[states] = len(self._members)
            self._members.append(states)
            self._moves.append({})
        return number

    def _moved(self, here: int, char: str) -> frozenset[int]:
        self._spend(len(self._members[here]))
        reached = []
        for state in self._members[here]:
            edge = self._edges[state]
            if edge is not None and edge[0](char):
                reached.append(edge[1])
        return frozenset(self._closed(reached))

    def _closed(self, states: list[int]) -> set[int]:
        found = set(states)
        while states:
            for each in self._free[states.pop()]:
                if each not in found:
                    found.add(each)
                    states.append(each)
        self._spend(len(found))
        return found

    def _spend(self, steps: int) -> None:
        self._steps += steps + 1
        if self._steps > MOST_STEPS:
            raise BadQuestion("a regular expression takes too long: make it simpler")
