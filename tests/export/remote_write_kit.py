"""What the tests of remote write share: writers that do everything at once, and what arrived."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from batchmill.export import RemoteWriter, RemoteWriteSettings
from batchmill.store import Store, open_store
from tests.kit.servers.prometheus import Key, Receiver, after

QUICK: dict[str, Any] = {
    "poll_s": 0.01,
    "initial_ms": 5,
    "max_ms": 20,
    "late_every_s": 0,
    "close_timeout_s": 0.2,
}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """An empty store."""
    with open_store(f"sqlite:///{tmp_path}/store.db") as opened:
        yield opened


@pytest.fixture
def position(tmp_path: Path) -> Path:
    """Where a writer notes how far it has come."""
    return tmp_path / "position.json"


def writing(
    store: Store,
    to: str,
    position: Path,
    clock: Callable[[], float] = time.time,
    **settings: Any,
) -> RemoteWriter:
    """A writer that does everything at once."""
    options = RemoteWriteSettings(**(QUICK | settings))
    return RemoteWriter(store, to, position, options, clock=clock)


def reached(writer: RemoteWriter, minute: int) -> bool:
    """Whether a minute is the last one that a writer is done with."""
    return writer.stats().minute == minute


def sent(receiver: Receiver, minute: int) -> dict[Key, float]:
    """What a receiver took of a minute, stale markers left out; the last value of each series."""
    samples: dict[Key, float] = {}
    for labels, value, at_ms in receiver.samples():
        if at_ms == after(minute) * 1000 and value == value:
            name = labels.pop("__name__")
            samples[name, frozenset(labels.items())] = value
    return samples


def not_empty(values: dict[Key, float]) -> dict[Key, float]:
    """The same with labels as remote write has them: none that is empty."""
    return {
        (name, frozenset(label for label in labels if label[1])): value
        for (name, labels), value in values.items()
    }
