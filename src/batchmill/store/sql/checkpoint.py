"""Whether a checkpoint and a store belong together, and whether a batch is the next one.

The checkpoint says which input was read, the store what came of it. A batch goes into the store
first and is marked done in the checkpoint after that, so the store may be one batch ahead: that
batch comes again, and is known by its number. It must have been planned, though: only then does the
same number stand for the same input. Any other distance means that one of the two was restored from
an older copy, or swapped; going on would lose rows or count them twice.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from batchmill.store.errors import BatchGapError, CheckpointMismatchError, FencedError


class Exempt(enum.Enum):
    """Stands for the newest planned batch of a stream that plans none."""

    NO_LOG = "no log"
    """There is no log of plans: the input of batch 0 is passed by hand and is always the same."""


@dataclass(frozen=True, slots=True)
class StreamState:
    """What the store knows of a stream."""

    checkpoint_id: str
    epoch: int
    last_batch: int | None
    token: str | None
    """The last commit's own mark, which tells whether it got in when the answer was lost."""


def check_claim(
    stream: str,
    known: StreamState | None,
    checkpoint_id: str,
    *,
    fresh: bool,
    committed: int | None,
    planned: int | Exempt | None = Exempt.NO_LOG,
) -> None:
    """Raise :class:`CheckpointMismatchError` unless the checkpoint goes with what is known.

    ``planned`` is the newest batch whose input the checkpoint has laid down.
    """
    if known is None:
        if fresh:
            return
        raise CheckpointMismatchError(
            stream,
            "unknown",
            f"the checkpoint {checkpoint_id} was used before, but the store has never seen it, so "
            "the store was deleted or is another one",
            "name the store that was written with this checkpoint; or, to start anew, use an empty "
            "folder as the checkpoint, and all input that is still there is read again",
        )
    if known.checkpoint_id != checkpoint_id:
        raise CheckpointMismatchError(
            stream,
            "other",
            f"the store has data of another checkpoint ({known.checkpoint_id}), and reading the "
            f"input again with {checkpoint_id} would count it twice",
            "run with that checkpoint; or use a new store; or give this run another stream name, "
            "if it reads other input",
        )
    ahead = _ordinal(known.last_batch) - _ordinal(committed)
    if ahead == 0 or (ahead == 1 and planned in (known.last_batch, Exempt.NO_LOG)):
        return
    where = f"the store is at batch {_shown(known.last_batch)}, the checkpoint at {{}}".format(
        _shown(committed)
    )
    if ahead == 1:
        assert not isinstance(planned, Exempt)
        raise CheckpointMismatchError(
            stream,
            "unplanned",
            f"{where}, and the newest batch that it has planned is {_shown(planned)}: the "
            f"checkpoint was restored from an older copy or emptied, and new input would be taken "
            f"for batch {known.last_batch}, which is in the store, and skipped",
            "restore the store's copy of the same time, too; or start anew with an empty store and "
            "an empty checkpoint folder",
        )
    if ahead < 0:
        raise CheckpointMismatchError(
            stream,
            "behind",
            f"{where}: the store was restored from an older copy, and batches are missing in it",
            "restore the checkpoint's copy of the same time, too; or start anew with an empty "
            "store and an empty checkpoint folder",
        )
    raise CheckpointMismatchError(
        stream,
        "ahead",
        f"{where}: the checkpoint was restored from an older copy, and what came since would be "
        "cut into other batches",
        "restore the store's copy of the same time, too; or start anew with an empty store and an "
        "empty checkpoint folder",
    )


def is_replay(
    stream: str, known: StreamState | None, epoch: int, number: int | None, token: str
) -> bool:
    """Whether that commit is in the store already.

    ``number`` is None for a commit without one. Raises :class:`FencedError` if the stream belongs
    to another writer, :class:`BatchGapError` if a batch in between is missing.
    """
    if known is None or known.epoch != epoch:
        raise FencedError(stream, epoch, None if known is None else known.epoch)
    if known.token == token:
        return True
    if number is None:
        return False
    expected = _ordinal(known.last_batch) + 1
    if number > expected:
        raise BatchGapError(stream, number, expected)
    return number < expected


def _ordinal(number: int | None) -> int:
    return -1 if number is None else number


def _shown(number: int | None) -> str:
    return "none" if number is None else str(number)
