"""The folder of an outbox: files written for good, and removed when nobody names them.

<outbox>/outbox.json                 its id, by which the store's rows know it
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

from batchmill.outbox import file as file_module
from batchmill.outbox.errors import NoOutboxError
from batchmill.outbox.file import Changes
from batchmill.outbox.settings import OutboxSettings
from batchmill.store import Batch, Layout, Outgoing

log = logging.getLogger("batchmill.outbox")

FOLDER = "outbox"
_NAME = "outbox.json"
_SUFFIX = ".arrow"
_OLD_S = 86_400.0
"""What another stream left unnamed for so long is nobody's: it is not about to be committed."""


class Outbox:
    """A folder of changes. Several streams may write it at once, each its own sub-folder."""

    def __init__(self, folder: Path, settings: OutboxSettings | None = None) -> None:
        """See :meth:`open` and :meth:`of`."""
        self.folder = folder
        self.settings = settings or OutboxSettings()
        self.place = str(json.loads((folder / _NAME).read_text("utf-8"))["id"])
        """Its id."""

    @classmethod
    def open(cls, checkpoint: Path, settings: OutboxSettings | None = None) -> Outbox:
        """The outbox of a pipeline with that checkpoint; made if there is none."""
        folder = checkpoint / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / _NAME).exists():
            _create(folder / _NAME, json.dumps({"id": uuid.uuid4().hex}))
        return cls(folder, settings)

    @classmethod
    def of(cls, checkpoint: Path) -> Outbox:
        """The outbox that is there; raises :class:`NoOutboxError` if there is none."""
        try:
            return cls(checkpoint / FOLDER)
        except FileNotFoundError:
            raise NoOutboxError(str(checkpoint)) from None

    def write(self, batch: Batch, layout: Layout) -> Outgoing | None:
        """Put a batch's changes into a file that survives a power cut; None if it has none."""
        if not file_module.count_rows(batch):
            return None
        folder = self.folder / batch.stream
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            _sync(self.folder)
        path = folder / f"{batch.number}-{uuid.uuid4().hex[:12]}{_SUFFIX}"
        try:
            with path.open("wb") as file:
                rows = file_module.write(file, batch, layout)
                file.flush()
                os.fsync(file.fileno())
                size = file.tell()
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        _sync(folder)
        name = f"{batch.stream}/{path.name}"
        return Outgoing(
            self.place, name, rows, size, self.settings.max_files, self.settings.max_bytes
        )

    def read(self, path: str) -> Iterator[Changes]:
        """The changes in a file, some rows at a time."""
        return file_module.read(self.folder / path)

    def remove(self, paths: Iterable[str]) -> None:
        """Remove files that no row of the store names any more."""
        for each in paths:
            try:
                (self.folder / each).unlink(missing_ok=True)
            except OSError as error:
                log.warning("%s stays until its stream is next claimed: %s", each, error)

    def tidy(self, stream: str, named: Collection[str]) -> None:
        """Remove the files of a stream that the store does not name: their commit failed.

        Call it only with the right to write the stream. Of other streams, which may be about to
        commit, only what is a day old goes.
        """
        old = time.time() - _OLD_S
        for path in self.folder.glob(f"*/*{_SUFFIX}"):
            if f"{path.parent.name}/{path.name}" in named:
                continue
            with contextlib.suppress(FileNotFoundError):
                if path.parent.name == stream or path.stat().st_mtime < old:
                    path.unlink()
        for folder in self.folder.iterdir():
            # Of a backfill that is over.
            if folder.is_dir() and folder.name != stream and folder.stat().st_mtime < old:
                with contextlib.suppress(OSError):  # there is something in it
                    folder.rmdir()


def _create(file: Path, text: str) -> None:
    """In one piece and for good; one that another process has made meanwhile stays."""
    temporary = file.with_name(f".{file.name}-{uuid.uuid4().hex}")
    with temporary.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    try:
        os.link(temporary, file)
    except FileExistsError:
        return
    finally:
        temporary.unlink()
    _sync(file.parent)
    _sync(file.parent.parent)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
