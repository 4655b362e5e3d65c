"""The items that wait, and when the first of them make a batch: no lock, no thread, no clock."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Hashable
from typing import Any

from batchmill.batcher.result import ItemResult
from batchmill.batcher.settings import BatcherSettings


class FlushReason(enum.Enum):
    """Why a batch was sent when it was."""

    SIZE = "size"
    WEIGHT = "weight"
    LINGER = "linger"
    FLUSH = "flush"
    CLOSE = "close"


class Entry:
    """One submitted item on its way; subclasses know whom to tell."""

    __slots__ = (
        "__weakref__",
        "attempt",
        "born",
        "deadline",
        "item",
        "key",
        "sent",
        "seq",
        "since",
        "weight",
    )

    def __init__(self, item: Any, since: float, deadline: float | None) -> None:
        self.item = item
        self.born = since  # when it was submitted
        self.since = since  # when it was accepted: linger counts from here
        self.deadline = deadline
        self.seq = 0  # its place in the order of acceptance, from 1
        self.sent = False
        self.attempt = 1
        self.weight = 0.0
        self.key: Hashable = None

    def start(self) -> bool:
        """The item is about to be sent; False when its submitter cancelled it."""
        raise NotImplementedError

    def is_cancelled(self) -> bool:
        """Whether its submitter has cancelled it; unlike start(), it changes nothing."""
        raise NotImplementedError

    def resolve(self, result: ItemResult[Any]) -> None:
        """Tell the submitter; harmless when it does not listen any more."""
        raise NotImplementedError


class Pending:
    """Entries in the order they were accepted; its user holds a lock."""

    def __init__(self, config: BatcherSettings) -> None:
        self._config = config
        self._linger_s = config.linger_ms / 1000
        self._entries: deque[Entry] = deque()
        self._next_seq = 1
        self.weight = 0.0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def last_seq(self) -> int:
        """The number of the newest entry ever accepted."""
        return self._next_seq - 1

    @property
    def first_seq(self) -> int | None:
        """The number of the oldest entry that still waits."""
        return self._entries[0].seq if self._entries else None

    def add(self, entry: Entry) -> bool:
        """Queue an entry; whether the one who forms batches should have a look now."""
        entry.seq = self._next_seq
        self._next_seq += 1
        self._entries.append(entry)
        self.weight += entry.weight
        count = len(self._entries)
        if count == 1 or count % self._config.batch_size == 0:
            return True
        heavy = self._config.max_weight
        return heavy is not None and self.weight >= heavy

    def ready(self, now: float, flush_up_to: int, closing: bool) -> FlushReason | None:
        """Why a batch should go now, or None."""
        if not self._entries:
            return None
        if len(self._entries) >= self._config.batch_size:
            return FlushReason.SIZE
        heavy = self._config.max_weight
        if heavy is not None and self.weight >= heavy:
            return FlushReason.WEIGHT
        first = self._entries[0]
        if closing:
            return FlushReason.CLOSE
        if first.seq <= flush_up_to:
            return FlushReason.FLUSH
        if now >= first.since + self._linger_s:
            return FlushReason.LINGER
        return None

    def due_at(self) -> float | None:
        """When the oldest entry has lingered long enough."""
        return self._entries[0].since + self._linger_s if self._entries else None

    def take(self) -> list[Entry]:
        """Remove the next batch: as many as size and weight allow, and at least one."""
        batch: list[Entry] = []
        total = 0.0
        heavy = self._config.max_weight
        entries = self._entries
        size = self._config.batch_size
        while entries and len(batch) < size:
            weight = entries[0].weight
            if heavy is not None and batch and total + weight > heavy:
                break
            total += weight
            batch.append(entries.popleft())
        self.weight = self.weight - total if entries else 0.0
        return batch

    def remove(self, entry: Entry) -> bool:
        """Take one entry out of the middle; False when it is not there any more."""
        try:
            self._entries.remove(entry)
        except ValueError:
            return False
        self.weight = self.weight - entry.weight if self._entries else 0.0
        return True

    def replace(self, entry: Entry, other: Entry) -> None:
        """Put another entry in the place of one that waits."""
        self._entries[self._entries.index(entry)] = other
        self.weight += other.weight - entry.weight

    def __contains__(self, entry: Entry) -> bool:
        return entry in self._entries

    def take_all(self) -> list[Entry]:
        """Remove everything."""
        rest = list(self._entries)
        self._entries.clear()
        self.weight = 0.0
        return rest
