"""The books of a batcher: what became of every item, and who still has to be told.

Guarantees
    * An entry is counted, under the lock, before its submitter hears of it.
    * Whoever waits for answers is woken after they were told.
    * What a submitter's callback raises is logged; the other entries are told all the same.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

from batchmill.batcher.intake import Answer
from batchmill.batcher.pending import Entry
from batchmill.batcher.result import ItemResult
from batchmill.batcher.twins import Twins
from batchmill.waiters import ThreadWaiter

log = logging.getLogger("batchmill.batcher")

# How these end is no fate that an equal item would share: one of them takes the place.
_ALONE = ("expired", "cancelled")


class Ledger:
    """Counts and tells. ``book`` and ``told_up_to`` are called with the lock held."""

    def __init__(self, name: str, lock: threading.Lock, twins: Twins) -> None:
        self._name = name
        self._lock = lock
        self._twins = twins
        self._telling: dict[int, tuple[int, int]] = {}  # the oldest entry, and the thread
        self.waiters: list[ThreadWaiter] = []
        """Woken whenever accepted entries have been told."""
        self.counts = dict.fromkeys(
            ("submitted", "succeeded", "failed", "rejected", "dropped", "expired", "cancelled"), 0
        )

    def book(self, answers: Sequence[Answer]) -> list[Answer]:
        """Count entries, and those that joined them; the answers to tell()."""
        told = list(answers)
        for entry, result, kind in answers:
            if entry.key is not None and result is not None and kind not in _ALONE:
                for follower in self._twins.release(entry):
                    told.append(_share(follower, result, kind))
        for _, _, kind in told:
            self.counts[kind] += 1
        oldest = min((entry.seq for entry, _, _ in told if entry.seq), default=0)
        if oldest:
            self._telling[id(told)] = (oldest, threading.get_ident())
        return told

    def tell(self, told: list[Answer]) -> None:
        """Tell the submitters; to be called without the lock, for their callbacks run here."""
        for entry, result, _ in told:
            if result is None:
                continue
            try:
                entry.resolve(result)
            except BaseException:  # a callback of its owner: the others are to hear all the same
                log.exception("batchmill batcher %s: an item's owner failed", self._name)
        with self._lock:
            if self._telling.pop(id(told), None) is not None:
                for waiter in self.waiters:
                    waiter.wake()

    def told_up_to(self, seq: int) -> bool:
        """Whether nobody is telling an entry up to ``seq``, but for the calling thread itself."""
        here = threading.get_ident()
        return all(oldest > seq or thread == here for oldest, thread in self._telling.values())


def _share(entry: Entry, result: ItemResult[Any], kind: str) -> Answer:
    """An equal entry's answer as this one's."""
    if not entry.start():
        return entry, None, "cancelled"
    shared = ItemResult(entry.item, result.outcome, result.value, result.error, result.level)
    return entry, shared, kind
