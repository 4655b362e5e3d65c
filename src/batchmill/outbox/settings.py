"""The settings and the errors of an outbox: what loads without pyarrow."""

from __future__ import annotations

from dataclasses import dataclass

from batchmill.errors import BatchmillError, check_ints


@dataclass(frozen=True, kw_only=True)
class OutboxSettings:
    """How much an outbox may hold: beyond it the oldest files are dropped, and counted."""

    max_bytes: int = 2**30
    max_files: int = 10_000

    def __post_init__(self) -> None:
        check_ints(self, 1, "max_bytes", "max_files")


class NoOutboxError(BatchmillError, FileNotFoundError):
    """There is no outbox in that folder."""

    folder: str
    template = (
        "there is no outbox in {folder}: give the checkpoint of a pipeline that runs with "
        "--outbox, and start that pipeline first"
    )


class OutboxFileError(BatchmillError, ValueError):
    """A file of the outbox cannot be read."""

    path: str
    why: str
    template = (
        "{path} is not a readable outbox file ({why}): it was changed or the disk is damaged. "
        "The store still has the values that it held"
    )
