"""The second part of the queue demo: thresholds at work."""

from __future__ import annotations

import io

import pytest

pytest.importorskip("rich")

from rich.console import Console

from batchmill.batcher import BatcherSettings, MicroBatcher
from batchmill.pressure import QueueAction, ThresholdLevel
from examples.queue_demo import pressure


def shown() -> tuple[bool, str]:
    """The part as it appears in a file, and whether it says all is well."""
    console = Console(file=io.StringIO(), width=80, color_system=None, force_terminal=False)
    well = pressure.run(console)
    assert isinstance(console.file, io.StringIO)
    return well, console.file.getvalue()


def test_every_order_is_accounted_for() -> None:
    """The part ends with a balance, and the balance holds."""
    well, text = shown()
    assert well
    assert "submitted 800 = sent" in text


def test_the_burst_crosses_all_three_levels() -> None:
    """At each level something was decided, and it is in the table."""
    batcher: MicroBatcher[pressure.Order] = MicroBatcher(
        pressure._send, BatcherSettings(batch_size=pressure.BATCH), pressure.thresholds()
    )
    with batcher:
        batcher.submit_many(map(pressure.Order, range(pressure.BURST)))
    decided = batcher.stats().thresholds
    assert decided is not None
    assert {level for level, _ in decided.decisions} == set(ThresholdLevel)
    assert decided.decisions[(ThresholdLevel.CRITICAL_PLUS, QueueAction.DROP)] > 0


def test_the_table_names_levels_and_actions() -> None:
    """A reader finds every level with its depth, and a column for every action."""
    _, text = shown()
    for word in ("WARNING", "CRITICAL_PLUS", "accept", "reject", "drop", "retry", "300"):
        assert word in text
