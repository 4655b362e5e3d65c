"""The errors of an outbox."""

from __future__ import annotations

from batchmill.errors import BatchmillError


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
