"""The kernel's results against the oracle: every function, filter and label, any split of rows."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from batchmill.aggregate import Aggregator, Deltas, EntityBook, contribution
from batchmill.oal import load
from batchmill.store import Batch, Store, open_store
from tests.kit.pipelines import (
    EVERY_FUNCTION,
    EVERY_SOURCE,
    differences,
    every_events,
    expected,
    stored,
)
from tests.oracle.catalog import Row
from tests.oracle.generate import to_table


def commit(
    store: Store,
    deltas: Mapping[str, Deltas],
    aggregators: Mapping[str, Aggregator],
    layout: Any,
    claim: Any,
    number: int,
) -> None:
    book = EntityBook()
    batch = Batch("s", claim.epoch, number)
    for source, part in deltas.items():
        made = contribution(part, aggregators[source], layout, book)
        batch.deltas += made.deltas
        for minute, rows in made.rows_by_minute.items():
            batch.newest_minute = max(batch.newest_minute or 0, minute)
    batch.entities = book.rows()
    store.commit(batch)


def test_every_function(tmp_path: Path) -> None:
    events = every_events(7, EVERY_SOURCE, 300)
    metrics = load(EVERY_FUNCTION)
    aggregators = {
        source: Aggregator(metrics.catalog.source(source), own)
        for source, own in metrics.by_source().items()
    }
    with open_store(f"sqlite:///{tmp_path / 'm.db'}", ttl_days=365) as store:
        claim = store.claim("s", "c", fresh=True, committed=None)
        layout = store.register(metrics, stream="s")
        deltas = {}
        for source, rows in events.items():
            made = aggregators[source].make(to_table(source, rows))
            assert not made.invalid
            deltas[source] = made.deltas
        commit(store, deltas, aggregators, layout, claim, 0)
        assert differences(stored(store), expected(events)) == []
