"""The cache of measures is bounded, and its results are right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from batchmill.store import decode_numbers
from batchmill.web.api import measures
from batchmill.web.api.measures import MeasureCache


class _Plan:
    """Reads a tally by number."""

    def states(self, values: Sequence[Any]) -> tuple[Any, ...]:
        return (decode_numbers(values[0]),)


def test_it_removes_the_older_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and tallies are kept up to a limit."""
    monkeypatch.setattr(measures, "MOST_CACHED_ROWS", 10)
    monkeypatch.setattr(measures, "MOST_TALLIES", 4)
    cache = MeasureCache()
    known = cache.rows("mark", 1)
    known.update({(number, 0): (number, ()) for number in range(12)})
    assert [key for key, _ in cache.rows("mark", 1)] == [6, 7, 8, 9, 10, 11]
    assert cache.rows("mark", 60) == {}
    for number in range(20):
        tally = cache.tally(_Plan(), [f"{number + 9}", "1:2"], ["5", "1"])
        assert tally == {number + 9: 1, 1: 3, 5: 1}
        assert len(cache._tallies) <= 4
