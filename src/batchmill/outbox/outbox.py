"""The folder of an outbox: durable files, removed when the store lists them no more.

<outbox>/outbox.json                 its id, by which the store's rows refer to it
<outbox>/<stream>/<batch>-<x>.arrow  the changes of one batch
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
import uuid
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from batchmill import files
from batchmill.outbox.changes import Changes, count_rows, read_changes, write_changes
from batchmill.outbox.settings import NoOutboxError, OutboxSettings
from batchmill.store import Batch, Layout, Outgoing

log = logging.getLogger("batchmill.outbox")

FOLDER = "outbox"
_NAME = "outbox.json"
_SUFFIX = ".arrow"
_OLD_S = 86_400.0
"""An unlisted file of another stream that is older than this is not about to be committed."""


class Outbox:
    """A folder of changes. Several streams may write it at once, each its own sub-folder."""

    def __init__(self, folder: Path, settings: OutboxSettings | None = None) -> None:
        """Use :meth:`open` or :meth:`of`."""
        self.folder = folder
        self.settings = settings or OutboxSettings()
        self.place = str(json.loads((folder / _NAME).read_text("utf-8"))["id"])
        """Its id."""

    @classmethod
    def open(cls, checkpoint: Path, settings: OutboxSettings | None = None) -> Outbox:
        """The outbox of a pipeline with that checkpoint; created if there is none."""
        folder = checkpoint / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        name = folder / _NAME
        if not name.exists() and files.create_whole(name, json.dumps({"id": uuid.uuid4().hex})):
            files.sync(checkpoint)
        return cls(folder, settings)

    @classmethod
    def of(cls, checkpoint: Path) -> Outbox:
        """The outbox that is there; raises :class:`NoOutboxError` if there is none."""
        try:
            return cls(checkpoint / FOLDER)
        except FileNotFoundError:
            raise NoOutboxError(str(checkpoint)) from None

    def write(self, batch: Batch, layout: Layout) -> Outgoing | None:
        """Write a batch's changes to a file that survives a power cut; None if it has none."""
        if not count_rows(batch):
            return None
        folder = self.folder / batch.stream
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            files.sync(self.folder)
        path = folder / f"{batch.number}-{uuid.uuid4().hex[:12]}{_SUFFIX}"
        try:
            with path.open("wb") as file:
                rows = write_changes(file, batch, layout)
                file.flush()
                os.fsync(file.fileno())
                size = file.tell()
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        files.sync(folder)
        name = f"{batch.stream}/{path.name}"
        return Outgoing(
            self.place, name, rows, size, self.settings.max_files, self.settings.max_bytes
        )

    def read(self, path: str) -> Iterator[Changes]:
        """The changes in a file, some rows at a time."""
        return read_changes(self.folder / path)

    def remove(self, paths: Iterable[str]) -> None:
        """Remove files that the store lists no more."""
        for path in paths:
            try:
                (self.folder / path).unlink(missing_ok=True)
            except OSError as error:
                log.warning("%s stays until its stream is claimed again: %s", path, error)

    def tidy(self, stream: str, listed: Collection[str]) -> None:
        """Remove the files of a stream that the store does not list: their commit failed.

        Call it only while the stream is claimed. Of other streams, which may be about to commit,
        only files that are a day old are removed.
        """
        old = time.time() - _OLD_S
        for path in self.folder.glob(f"*/*{_SUFFIX}"):
            if f"{path.parent.name}/{path.name}" in listed:
                continue
            with contextlib.suppress(FileNotFoundError):
                if path.parent.name == stream or path.stat().st_mtime < old:
                    path.unlink()
        for folder in self.folder.iterdir():
            # Of a backfill that has ended.
            if folder.is_dir() and folder.name != stream and folder.stat().st_mtime < old:
                with contextlib.suppress(OSError):  # it is not empty
                    folder.rmdir()
