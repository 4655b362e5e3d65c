"""The checkpoint folder: which stream it belongs to, and how far that has come.

    <checkpoint>/batchmill.json    the stream, and the store it is written to
    <checkpoint>/books.jsonl       what the newest batch is made of, and what was read
    <checkpoint>/state/            spans that wait for their partner, and ids of counted ones
    <checkpoint>/kafka/            the messages of the current batch, decoded
    <checkpoint>/outbox/           the changes of each commit, for exporters
    <checkpoint>/progress.json     how far the stream has come, for people

In a checkpoint of version 1, Spark kept the books in ``spark/``; they are taken over.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Set
from dataclasses import dataclass
from pathlib import Path

from batchmill.spark.errors import PipelineError
from batchmill.spark.files.paths import AnyPath, create_whole, remove_stale_temporaries
from batchmill.spark.input import books
from batchmill.spark.input.books import Account, Books, read_account
from batchmill.spark.runtime import takeover
from batchmill.spark.runtime.takeover import Marks

_NAME = "batchmill.json"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder of a stream."""

    folder: AnyPath
    id: str = ""
    """Empty if it is only read."""

    @property
    def state(self) -> AnyPath:
        """The folder of what batches keep for later ones."""
        return self.folder / "state"

    def marks(self) -> Marks:
        """How far the stream has come by now."""
        account = read_account(self.folder)
        if account is None and isinstance(self.folder, Path):
            return takeover.marks_of(self.folder)
        return Marks() if account is None else Marks(account.done, account.planned)

    def books(
        self, present: Callable[[], Set[str]], now: float, parts: int, *, write: bool
    ) -> Books:
        """The books; those of version 1 are taken over, see :func:`.takeover.account_of`.

        With ``write``, this process is the only one that has the stream.
        """
        own = Books(self.folder, self._account(present, now, parts))
        if write:
            own.open()
            if isinstance(self.folder, Path):
                takeover.remove(self.folder)
        return own

    def segments_until(self, last: int | None) -> int:
        """How many segments went into the batches up to that one."""
        account = self._account(frozenset, 0.0, 0)
        plan = account.open_plan
        if plan is not None and last is not None and plan.batch <= last:
            account.finish(plan.batch)
        return account.segments

    def _account(self, present: Callable[[], Set[str]], now: float, parts: int) -> Account:
        account = read_account(self.folder)
        if account is not None:
            return account
        if isinstance(self.folder, Path):
            return takeover.account_of(self.folder, present, now, parts)
        return Account()  # version 1 had local folders only


def open_checkpoint(folder: AnyPath, stream: str, store_id: str) -> Checkpoint:
    """Open the checkpoint in ``folder``; a new one is created if there is none."""
    folder.mkdir(parents=True, exist_ok=True)
    remove_stale_temporaries(folder)
    file = folder / _NAME
    if not file.exists():
        old = isinstance(folder, Path) and takeover.is_in(folder)
        if old or (folder / books.NAME).exists():
            raise PipelineError(
                f"{folder} holds a checkpoint without {_NAME}, so it is not known which "
                "store it belongs to: name another folder, or put the file back from a backup"
            )
        # If another process has just created one, its id is read: two ids in turn would make one
        # stream look like two.
        facts = {"id": uuid.uuid4().hex, "stream": stream, "store": store_id}
        create_whole(file, json.dumps(facts).encode())
    try:
        facts = json.loads(file.read_bytes())
        checkpoint = Checkpoint(folder, facts["id"])
        owner = facts["stream"]
    except (ValueError, KeyError, TypeError) as error:
        raise PipelineError(
            f"{file} cannot be read ({error}): put it back from a backup, or start with an empty "
            "checkpoint folder and an empty store"
        ) from error
    if owner != stream:
        raise PipelineError(
            f"{folder} is the checkpoint of the stream {owner!r}, not of {stream!r}: "
            "give each stream a checkpoint folder of its own"
        )
    return checkpoint
