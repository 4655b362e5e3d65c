"""What the overview remembers: bounded, and never what is no longer true."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from batchmill.store.tallies import decode_numbers
from batchmill.web.api import memory as memory_module
from batchmill.web.api.memory import Memory


class _Plan:
    """Reads a tally by number."""

    def states(self, values: Sequence[Any]) -> tuple[Any, ...]:
        return (decode_numbers(values[0]),)


def test_it_forgets_the_older_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows, and of tallies, no more than so many are kept for the next one who asks."""
    monkeypatch.setattr(memory_module, "MOST_ROWS", 10)
    monkeypatch.setattr(memory_module, "MOST_TALLIES", 4)
    memory = Memory()
    known = memory.rows("mark", 1)
    known.update({(number, 0): (number, ()) for number in range(12)})
    assert [key for key, _ in memory.rows("mark", 1)] == [6, 7, 8, 9, 10, 11]
    assert memory.rows("mark", 60) == {}
    for number in range(20):
        found = memory.tally(_Plan(), [f"{number + 9}", "1:2"], ["5", "1"])
        assert found == {number + 9: 1, 1: 3, 5: 1}
        assert len(memory._tallies) <= 4
