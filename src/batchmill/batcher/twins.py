"""Entries with equal keys: one is sent, the others wait for its answer. No lock, no thread.

Guarantees
    * Per key there is one primary, the entry that is sent; the rest are its followers.
    * A primary that leaves unsent (cancelled, out of time) leaves its place to a follower.
"""

from __future__ import annotations

from collections.abc import Hashable

from batchmill.batcher.pending import Entry


class Twins:
    """Who waits for whose answer; its user holds a lock."""

    __slots__ = ("_groups", "count")

    def __init__(self) -> None:
        self._groups: dict[Hashable, tuple[Entry, list[Entry]]] = {}
        self.count = 0
        """Followers in all."""

    def join(self, entry: Entry) -> bool:
        """Have an entry wait for an equal one's answer; False when it is the first of its kind."""
        group = self._groups.get(entry.key)
        if group is None:
            self._groups[entry.key] = (entry, [])
            return False
        group[1].append(entry)
        self.count += 1
        return True

    def heir(self, entry: Entry) -> Entry | None:
        """The primary leaves: the follower that takes its place, if there is one."""
        group = self._groups.get(entry.key)
        if group is None or group[0] is not entry:
            return None
        if not group[1]:
            del self._groups[entry.key]
            return None
        heir, *rest = group[1]
        heir.seq = entry.seq
        self._groups[entry.key] = (heir, rest)
        self.count -= 1
        return heir

    def release(self, entry: Entry) -> list[Entry]:
        """The primary is answered: all who waited for that, and the key is free again."""
        group = self._groups.get(entry.key)
        if group is None or group[0] is not entry:
            return []  # it never was the primary: it came after close()
        del self._groups[entry.key]
        self.count -= len(group[1])
        return group[1]

    def leave(self, entry: Entry) -> bool:
        """Take a follower out, unless what it waits for has been sent already."""
        group = self._groups.get(entry.key)
        if group is None or group[0].sent or entry not in group[1]:
            return False
        group[1].remove(entry)
        self.count -= 1
        return True
