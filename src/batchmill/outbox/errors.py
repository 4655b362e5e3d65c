"""What can be wrong with an outbox."""

from __future__ import annotations

from batchmill.errors import BatchmillError


class NoOutboxError(BatchmillError, FileNotFoundError):
    """There is no outbox in that folder; carries ``folder``."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.folder = folder

    def __str__(self) -> str:
        return (
            f"there is no outbox in {self.folder}: name the checkpoint of a pipeline that runs "
            "with --outbox, and start that first"
        )


class OutboxFileError(BatchmillError, ValueError):
    """A file of the outbox cannot be read; carries ``path`` and ``why``."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(path, why)
        self.path = path
        self.why = why

    def __str__(self) -> str:
        return (
            f"{self.path} is no file of an outbox ({self.why}): somebody changed it, or the disk "
            "did. What it held is in the store all the same"
        )
