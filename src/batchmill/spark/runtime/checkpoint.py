"""The checkpoint folder: which stream it belongs to, and how far Spark has come in it.

    <checkpoint>/batchmill.json    the stream, and the store it is written to
    <checkpoint>/spark/            Spark's own: offsets, commits, the log of files
    <checkpoint>/state/            spans that wait for their partner, and ids of counted ones
    <checkpoint>/kafka/            the messages of the current batch, decoded
    <checkpoint>/removed.json      up to where segments that were read are removed
    <checkpoint>/outbox/           the changes of each commit, for exporters
    <checkpoint>/progress.json     how far the stream has come, for people

Spark's files are only read: their names are the numbers of its batches.
"""

from __future__ import annotations

import json
import urllib.parse
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchmill.files import create_whole
from batchmill.spark.errors import PipelineError

_NAME = "batchmill.json"
_MODE = 0o644
_UNREADABLE = (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError)
"""What reading Spark's files raises if they are missing or not in the expected format."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder of a stream."""

    folder: Path
    id: str = ""
    """Empty if it is only read."""

    @property
    def spark(self) -> Path:
        """Spark's own part."""
        return self.folder / "spark"

    @property
    def state(self) -> Path:
        """The folder of what batches keep for later ones."""
        return self.folder / "state"

    @property
    def fresh(self) -> bool:
        """Whether no batch was ever begun."""
        return self.planned is None

    @property
    def planned(self) -> int | None:
        """The last batch whose input Spark has logged; it may not be done yet."""
        return _latest(self.spark / "offsets")

    @property
    def committed(self) -> int | None:
        """The last batch that Spark has marked as done."""
        return _latest(self.spark / "commits")

    def files_of(self, number: int) -> list[str] | None:
        """The files of a batch, from Spark's log; None if it cannot be read.

        The frame that Spark passes to the batch leaves out files that are empty, or gone by now.
        """
        try:
            last = self._log_offset(number)
            before = -1 if number == 0 else self._log_offset(number - 1)
            return [_decoded(path) for path in self._logged(before, last)]
        except _UNREADABLE:
            return None

    def kafka_offsets(self, number: int, topic: str) -> dict[int, int] | None:
        """By partition, where the batch after that one begins; None if that is not known."""
        try:
            text = (self.spark / "offsets" / str(number)).read_text("utf-8")
            offsets = json.loads(text.splitlines()[-1])[topic]
            return {int(partition): int(offset) for partition, offset in offsets.items()}
        except _UNREADABLE:
            return None

    def segments_until(self, number: int) -> int:
        """How many segments went into the batches up to that one; 0 if that is not known."""
        last = self.log_offset(number)
        paths = None if last is None else self._logged_in_all(-1, last)
        return len(paths or ())

    def log_offset(self, number: int) -> int | None:
        """Up to where Spark's log of files belongs to that batch; None if that is not known."""
        try:
            return self._log_offset(number)
        except _UNREADABLE:
            return None

    def logged(self, after: int, until: int) -> list[str] | None:
        """The files in Spark's log between two offsets; None if it cannot be read."""
        try:
            paths = set(self._logged(after, until))
        except FileNotFoundError:  # Spark removes those before a compacted one after a while
            in_all = self._logged_in_all(after, until)
            if in_all is None:
                return None
            paths = in_all
        except _UNREADABLE:
            return None
        return sorted(map(_decoded, paths))

    def _log_offset(self, number: int) -> int:
        text = (self.spark / "offsets" / str(number)).read_text("utf-8")
        offset: int = json.loads(text.splitlines()[-1])["logOffset"]
        return offset

    def _logged(self, after: int, until: int) -> list[str]:
        return [
            entry["path"]
            for offset in range(after + 1, until + 1)
            for entry in _entries(self.spark / "sources" / "0", offset)
            if entry["batchId"] == offset
        ]

    def _logged_in_all(self, after: int, until: int) -> set[str] | None:
        try:
            # Every tenth file of the log also has all entries before it.
            return {
                entry["path"]
                for file in (self.spark / "sources" / "0").iterdir()
                if file.name.removesuffix(".compact").isdecimal()
                for entry in _lines(file)
                if after < entry["batchId"] <= until
            }
        except _UNREADABLE:
            return None


def open_checkpoint(folder: Path, stream: str, store_id: str) -> Checkpoint:
    """Open the checkpoint in ``folder``; a new one is created if there is none."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / _NAME
    if not file.exists():
        if (folder / "offsets").exists() or any((folder / "spark").glob("offsets/*")):
            raise PipelineError(
                f"{folder} holds a Spark checkpoint without {_NAME}, so it is not known which "
                "store it belongs to: name another folder, or put the file back from a backup"
            )
        # If another process has just created one, its id is read: two ids in turn would make one
        # stream look like two.
        facts = {"id": uuid.uuid4().hex, "stream": stream, "store": store_id}
        create_whole(file, json.dumps(facts), mode=_MODE)
    try:
        facts = json.loads(file.read_text("utf-8"))
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


def _decoded(path: str) -> str:
    """A file's name: Spark's log has it encoded as in a URL."""
    return "file:" + urllib.parse.unquote(urllib.parse.urlsplit(path).path)


def _entries(folder: Path, offset: int) -> list[dict[str, Any]]:
    file = folder / str(offset)
    if not file.exists():
        file = folder / f"{offset}.compact"
    return _lines(file)


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()[1:]]


def _latest(folder: Path) -> int | None:
    try:
        numbers = [int(file.name) for file in folder.iterdir() if file.name.isdecimal()]
    except FileNotFoundError:
        return None
    return max(numbers, default=None)
