"""The stream of a store that a process writes: claimed, numbered, committed exactly once."""

from __future__ import annotations

import itertools

from batchmill.store import (
    Batch,
    CheckpointMismatchError,
    CommitResult,
    FencedError,
    Store,
    StoreInUseError,
)

_CHECKPOINT = "workers"
"""Stands for the checkpoint, which such a stream does not have: nothing is read again."""


class Stream:
    """A stream that this process has claimed: ``name-0``, or the first that is free.

    A stream has one writer at a time, so every process that writes to a store has its own.
    """

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._last: int | None = None
        self._epoch = 0
        self._uncertain = False
        """Whether the last commit failed in a way that leaves open if it was committed."""
        for number in itertools.count():
            self.name = f"{name}-{number}"
            if self._claim():
                break

    def _claim(self) -> bool:
        """Claim the stream; False if another process has it."""
        while True:
            known = {stream.name: stream for stream in self._store.streams()}.get(self.name)
            self._last = known.last_batch if known else None
            try:
                claim = self._store.claim(
                    self.name, _CHECKPOINT, fresh=known is None, committed=self._last, wait=False
                )
            except StoreInUseError:
                return False
            except CheckpointMismatchError:
                # A pipeline's stream; or somebody wrote to it between the two calls.
                if known is not None and known.checkpoint_id != _CHECKPOINT:
                    return False
                continue
            self._epoch, self._last = claim.epoch, claim.last_batch
            return True

    def commit(self, batch: Batch) -> CommitResult:
        """Commit a batch under the next number.

        After an error give the same batch again: if it was committed nonetheless, the store knows
        its number, and does not count it twice. After a :class:`FencedError` another process has
        the stream.
        """
        batch.stream, batch.epoch = self.name, self._epoch
        batch.number = 0 if self._last is None else self._last + 1
        try:
            result = self._store.commit(batch)
        except FencedError:
            raise
        except BaseException:
            self._uncertain = True
            raise
        self._uncertain = False
        self._last = batch.number
        return result

    def leave(self) -> bool:
        """Give up the stream, which another process has taken over.

        False if the last batch, whose commit got no answer, may or may not be in the store.
        """
        self._store.release(self.name)
        if not self._uncertain:
            return True
        known = {stream.name: stream for stream in self._store.streams()}.get(self.name)
        # Once the other has claimed it, nothing of this process can be committed any more.
        return known is not None and known.last_batch == self._last
