"""The entries that wait: for a batch, or for the answer to an equal key. No lock, no thread.

Guarantees of ``Duplicates``
    * Per key there is one primary, the entry that is sent; the rest are its followers.
    * A primary that ends unsent (cancelled, expired) leaves its place to a follower.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Hashable

from batchmill.batcher.entries import Entry
from batchmill.batcher.settings import BatcherSettings


class FlushReason(enum.Enum):
    """Why a batch was sent when it was."""

    SIZE = "size"
    WEIGHT = "weight"
    LINGER = "linger"
    FLUSH = "flush"
    CLOSE = "close"


class Pending:
    """Entries that wait for a batch, in the order they were accepted; its user holds a lock."""

    def __init__(self, settings: BatcherSettings) -> None:
        self._settings = settings
        self._linger_s = settings.linger_ms / 1000
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
        """Queue an entry; whether a worker should look for a batch now."""
        entry.seq = self._next_seq
        self._next_seq += 1
        self._entries.append(entry)
        self.weight += entry.weight
        count = len(self._entries)
        if count == 1 or count % self._settings.batch_size == 0:
            return True
        max_weight = self._settings.max_weight
        return max_weight is not None and self.weight >= max_weight

    def ready(self, now: float, flush_up_to: int, closing: bool) -> FlushReason | None:
        """Why a batch should be sent now, or None."""
        if not self._entries:
            return None
        if len(self._entries) >= self._settings.batch_size:
            return FlushReason.SIZE
        max_weight = self._settings.max_weight
        if max_weight is not None and self.weight >= max_weight:
            return FlushReason.WEIGHT
        first = self._entries[0]
        if closing:
            return FlushReason.CLOSE
        if first.seq <= flush_up_to:
            return FlushReason.FLUSH
        if now >= first.accepted_at + self._linger_s:
            return FlushReason.LINGER
        return None

    def due_at(self) -> float | None:
        """When the oldest entry has lingered long enough."""
        return self._entries[0].accepted_at + self._linger_s if self._entries else None

    def take(self) -> list[Entry]:
        """Remove the next batch: as many as size and weight allow, and at least one."""
        batch: list[Entry] = []
        total = 0.0
        max_weight = self._settings.max_weight
        entries = self._entries
        size = self._settings.batch_size
        while entries and len(batch) < size:
            weight = entries[0].weight
            if max_weight is not None and batch and total + weight > max_weight:
                break
            total += weight
            batch.append(entries.popleft())
        self.weight = self.weight - total if entries else 0.0
        return batch

    def remove(self, entry: Entry) -> None:
        """Take out an entry that waits."""
        self._entries.remove(entry)
        self.weight = self.weight - entry.weight if self._entries else 0.0

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


class _Group:
    """The entries of one key."""

    __slots__ = ("followers", "primary")

    def __init__(self, primary: Entry) -> None:
        self.primary = primary
        self.followers: list[Entry] = []


class Duplicates:
    """Entries with equal keys: one is sent, the others get its answer. Its user holds a lock.

    Entries without a key may be passed to every method but ``join``: they have no followers.
    """

    __slots__ = ("_groups", "count")

    def __init__(self) -> None:
        self._groups: dict[Hashable, _Group] = {}
        self.count = 0
        """Followers in all."""

    def join(self, entry: Entry) -> bool:
        """Let an entry wait for the answer to its key; False when it is the first with that key."""
        group = self._groups.get(entry.key)
        if group is None:
            self._groups[entry.key] = _Group(entry)
            return False
        group.followers.append(entry)
        self.count += 1
        return True

    def promote(self, entry: Entry) -> Entry | None:
        """A primary ends unsent: the follower that takes its place, if there is one."""
        group = self._groups.get(entry.key)
        if group is None or group.primary is not entry:
            return None
        if not group.followers:
            del self._groups[entry.key]
            return None
        group.primary = group.followers.pop(0)
        group.primary.seq = entry.seq
        self.count -= 1
        return group.primary

    def release(self, entry: Entry) -> list[Entry]:
        """A primary is answered: its followers, and the key is free again."""
        group = self._groups.get(entry.key)
        if group is None or group.primary is not entry:
            return []  # it never was the primary: it came after close()
        del self._groups[entry.key]
        self.count -= len(group.followers)
        return group.followers

    def leave(self, entry: Entry) -> bool:
        """Take a follower out; False when it is none, or its primary has been sent already."""
        group = self._groups.get(entry.key)
        if group is None or group.primary.sent or entry not in group.followers:
            return False
        group.followers.remove(entry)
        self.count -= 1
        return True
