"""What L1 and L2 keep while states wait."""

from __future__ import annotations

from datetime import timedelta

import pytest

from batchmill.aggregate import Aggregator
from batchmill.oal import load
from batchmill.workers import l1
from batchmill.workers.events import EventReader
from batchmill.workers.l1 import DeltaBuffer
from tests.workers.kit import NOON, MillSale

SHOPS = 1_000


def test_waiting_states_take_at_most_twice_their_own_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many parts of the same minutes come: those that are not merged yet are bounded."""
    monkeypatch.setattr(l1, "_SMALL_BYTES", 0)
    metrics = load("mill_percentile = from(MillSale.cents).percentile2(1);")
    (own,) = metrics.by_source().values()
    aggregator = Aggregator(metrics.catalog.source("MillSale"), own)
    reader, buffer = EventReader(aggregator.plan), DeltaBuffer(aggregator)
    parts = []
    for part in range(60):
        moment = NOON + timedelta(minutes=part // 10)
        sales = [MillSale(f"shop {shop}", part % 7, moment) for shop in range(SHOPS)]
        parts.append(aggregator.make(reader.read(sales, 2**62).table).deltas)
        buffer.add(parts[-1])
        assert buffer.nbytes <= 2 * aggregator.merge(parts).nbytes
    assert int(buffer.merged().rows.sum()) == 60 * SHOPS
    assert buffer.nbytes == aggregator.merge(parts).nbytes
