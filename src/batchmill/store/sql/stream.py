"""Streams: claimed by one writer at a time, under a checkpoint.

The checkpoint says which input was read, the store what came of it. A batch is committed first and
marked done in the checkpoint after that, so the store may be one batch ahead: that batch comes
again, and is known by its number. It must have been planned, though: only then does the same number
stand for the same input. Any other distance means that one of the two was restored from an older
copy, or swapped; going on would lose rows or count them twice.
"""

from __future__ import annotations

import enum
import json
import os
import socket
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from batchmill.store.batch import Claim, StreamFile
from batchmill.store.clock import WriterClock
from batchmill.store.errors import BatchGapError, CheckpointMismatchError, FencedError
from batchmill.store.results import StreamInfo
from batchmill.store.sql.session import Session, read_meta


class Exempt(enum.Enum):
    """Instead of the newest planned batch, for a stream that plans none."""

    NO_LOG = "no log"
    """There is no log of plans: the input of batch 0 is given by hand and is always the same."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint as its stream's writer found it."""

    id: str
    fresh: bool
    """Whether it was made just now."""
    committed: int | None
    """The last batch that it has marked done; None: none."""
    planned: int | Exempt | None = Exempt.NO_LOG
    """The newest batch whose input it has planned; None: none."""


@dataclass(frozen=True, slots=True)
class StreamState:
    """What the store knows of a stream."""

    checkpoint_id: str
    epoch: int
    last_batch: int | None
    token: str | None
    """Identifies the last commit: it shows whether that succeeded though its answer was lost."""
    part_batch: int | None = None
    """The batch whose parts were begun last."""
    part_cutoff: int = 0
    """The oldest day that its parts keep."""
    part_run: int = 0
    """How often parts were begun in this stream."""
    clock_ms: int | None = None
    """What its writer's clock said at the last commit, in milliseconds since 1970."""
    steady_ms: int = 0
    """How long that clock had gone on without a step."""

    @property
    def clock(self) -> WriterClock | None:
        """What is known of its writer's clock."""
        if self.clock_ms is None:
            return None
        return WriterClock(self.clock_ms / 1000, self.steady_ms / 1000)


def claim(session: Session, stream: str, checkpoint: Checkpoint) -> Claim:
    """Start a new epoch of a stream, whose lock is held; in the transaction that is open."""
    known = stream_state(session, stream)
    check_claim(stream, known, checkpoint)
    epoch = known.epoch + 1 if known else 1
    since = datetime.now(UTC).isoformat(timespec="seconds")
    holder = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": since})
    if known:
        session.run(
            "UPDATE stream SET epoch = ?, holder = ? WHERE name = ?", (epoch, holder, stream)
        )
    else:
        session.run(
            "INSERT INTO stream (name, checkpoint_id, epoch, holder) VALUES (?, ?, ?, ?)",
            (stream, checkpoint.id, epoch, holder),
        )
    state_files = session.rows(
        "SELECT path, batch, arrived_ms, n_rows FROM carry WHERE stream = ? "
        "ORDER BY arrived_ms, path",
        (stream,),
    )
    last = known.last_batch if known else None
    return Claim(epoch, last, tuple(StreamFile(*row) for row in state_files))


def check_claim(stream: str, known: StreamState | None, checkpoint: Checkpoint) -> None:
    """Raise :class:`CheckpointMismatchError` unless the checkpoint matches what the store knows."""
    if known is None:
        if checkpoint.fresh:
            return
        raise CheckpointMismatchError(
            stream,
            "unknown",
            f"the checkpoint {checkpoint.id} was used before, but the store has never seen it, so "
            "the store was deleted or is another one",
            "use the store that was written with this checkpoint; or, to start again from nothing, "
            "use an empty folder as the checkpoint, and all input that is still there is read "
            "again",
        )
    if known.checkpoint_id != checkpoint.id:
        raise CheckpointMismatchError(
            stream,
            "other",
            f"the store has data of another checkpoint ({known.checkpoint_id}), and reading the "
            f"input again with {checkpoint.id} would count it twice",
            "run with that checkpoint; or use a new store; or give this run another stream name, "
            "if it reads other input",
        )
    ahead = _ordinal(known.last_batch) - _ordinal(checkpoint.committed)
    if ahead == 0 or (ahead == 1 and checkpoint.planned in (known.last_batch, Exempt.NO_LOG)):
        return
    where = (
        f"the store is at batch {_number(known.last_batch)}, "
        f"the checkpoint at {_number(checkpoint.committed)}"
    )
    start_again = "or start again with an empty store and an empty checkpoint folder"
    if ahead == 1:
        raise CheckpointMismatchError(
            stream,
            "unplanned",
            f"{where}, and the newest batch that it has planned is {_number(checkpoint.planned)}: "
            "the checkpoint was restored from an older copy or emptied, and new input would be "
            f"taken for batch {known.last_batch}, which is in the store, and skipped",
            f"restore the store's copy of the same time, too; {start_again}",
        )
    if ahead < 0:
        raise CheckpointMismatchError(
            stream,
            "behind",
            f"{where}: the store was restored from an older copy, and batches are missing in it",
            f"restore the checkpoint's copy of the same time, too; {start_again}",
        )
    raise CheckpointMismatchError(
        stream,
        "ahead",
        f"{where}: the checkpoint was restored from an older copy, and what came since would be "
        "cut into other batches",
        f"restore the store's copy of the same time, too; {start_again}",
    )


def is_replay(
    stream: str, known: StreamState | None, epoch: int, number: int, token: str | None = None
) -> bool:
    """Whether that commit is in the store already.

    Raises :class:`FencedError` if the stream belongs to another writer, :class:`BatchGapError` if a
    batch in between is missing.
    """
    if known is None or known.epoch != epoch:
        raise FencedError(stream, epoch, None if known is None else known.epoch)
    if token is not None and known.token == token:
        return True
    expected = _ordinal(known.last_batch) + 1
    if number > expected:
        raise BatchGapError(stream, number, expected)
    return number < expected


def _ordinal(number: int | None) -> int:
    return -1 if number is None else number


def _number(number: int | Exempt | None) -> str:
    return "none" if number is None else str(number)


def stream_state(session: Session, stream: str, lock: str = "") -> StreamState | None:
    """What is known of a stream; with a ``lock`` of the dialect it stays true."""
    rows = session.rows(
        "SELECT checkpoint_id, epoch, last_batch, token, part_batch, part_cutoff, part_run, "
        f"clock_ms, steady_ms FROM stream WHERE name = ? {lock}",
        (stream,),
    )
    return StreamState(*rows[0]) if rows else None


def stream_holder(session: Session, stream: str) -> dict[str, Any]:
    """The process that claimed a stream last, as far as it is known."""
    rows = session.rows("SELECT holder FROM stream WHERE name = ?", (stream,))
    holder: dict[str, Any] = json.loads(rows[0][0]) if rows and rows[0][0] else {}
    return holder


def all_streams(session: Session) -> list[StreamInfo]:
    """The progress of each stream, by name."""
    rows = session.rows(
        "SELECT name, checkpoint_id, epoch, last_batch, committed_at FROM stream ORDER BY name"
    )
    return [StreamInfo(*row) for row in rows]


def read_newest_minute(session: Session) -> int | None:
    """The newest minute that is not from the future."""
    value = read_meta(session, "newest_minute")
    return int(value) if value else None
