"""The checkpoint folder: whose it is, and how far Spark has come in it.

    <checkpoint>/batchmill.json    which stream this is, and of which store
    <checkpoint>/spark/            Spark's own: offsets, commits, the files seen
    <checkpoint>/carry/            spans that wait for their partner
    <checkpoint>/seen/             ids of spans that were counted
    <checkpoint>/kafka/            the messages of the batch that runs, decoded
    <checkpoint>/removed.json      how far the segments that were read are removed
    <checkpoint>/outbox/           what each commit changed, for exporters
    <checkpoint>/progress.json     how far the stream has come, for people

Spark's part is only looked at: the names of its files are the numbers of its batches.
"""

from __future__ import annotations

import json
import os
import urllib.parse
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchmill.spark.errors import PipelineError

_NAME = "batchmill.json"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder that is ours."""

    folder: Path
    id: str
    store_id: str

    @property
    def spark(self) -> Path:
        """Spark's own part."""
        return self.folder / "spark"

    @property
    def carry(self) -> Path:
        """Where spans wait."""
        return self.folder / "carry"

    @property
    def seen(self) -> Path:
        """Where the ids of counted spans are kept."""
        return self.folder / "seen"

    @property
    def fresh(self) -> bool:
        """Whether no batch was ever begun."""
        return self.planned is None

    @property
    def planned(self) -> int | None:
        """The last batch whose input Spark has written down; it may not be done yet."""
        return _latest(self.spark / "offsets")

    def files_of(self, number: int) -> list[str] | None:
        """The files that Spark has given a batch, from its own books; None if they are not there.

        What Spark hands to the batch itself leaves out files that are empty, or gone by now.
        """
        try:
            last = _log_offset(self.spark / "offsets" / str(number))
            before = -1 if number == 0 else _log_offset(self.spark / "offsets" / str(number - 1))
            found = [
                entry["path"]
                for offset in range(before + 1, last + 1)
                for entry in _entries(self.spark / "sources" / "0", offset)
                if entry["batchId"] == offset
            ]
        except (OSError, ValueError, KeyError, IndexError, TypeError):
            return None
        return [_decoded(each) for each in found]

    def kafka_offsets(self, number: int, topic: str) -> dict[int, int] | None:
        """By partition, where the batch after that one begins; None if that is not known."""
        try:
            text = (self.spark / "offsets" / str(number)).read_text("utf-8")
            found = json.loads(text.splitlines()[-1])[topic]
            return {int(partition): int(offset) for partition, offset in found.items()}
        except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError):
            return None

    @property
    def committed(self) -> int | None:
        """The last batch that Spark has marked as done."""
        return _latest(self.spark / "commits")

    def segments_until(self, number: int) -> int:
        """How many segments went into the batches up to that one; 0 if that is not known."""
        last = self.log_offset(number)
        found = None if last is None else self._all_logged(-1, last)
        return len(found or ())

    def log_offset(self, number: int) -> int | None:
        """How far Spark's log of files goes for that batch; None if that is not known."""
        try:
            return _log_offset(self.spark / "offsets" / str(number))
        except (OSError, ValueError, KeyError, IndexError, TypeError):
            return None

    def logged(self, after: int, until: int) -> list[str] | None:
        """The files that came into Spark's log between two offsets; None if it cannot be read."""
        try:
            found = {
                entry["path"]
                for offset in range(after + 1, until + 1)
                for entry in _entries(self.spark / "sources" / "0", offset)
                if entry["batchId"] == offset
            }
        except FileNotFoundError:  # those before a compacted one are removed after a while
            all_of_them = self._all_logged(after, until)
            if all_of_them is None:
                return None
            found = all_of_them
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return sorted(map(_decoded, found))

    def _all_logged(self, after: int, until: int) -> set[str] | None:
        try:
            # Every tenth file of the log has all that came before it, too.
            return {
                entry["path"]
                for file in (self.spark / "sources" / "0").iterdir()
                if file.name.removesuffix(".compact").isdecimal()
                for entry in _lines(file)
                if after < entry["batchId"] <= until
            }
        except (OSError, ValueError, KeyError, IndexError, TypeError):
            return None


def open_checkpoint(folder: Path, stream: str, store_id: str) -> Checkpoint:
    """The checkpoint in ``folder``, made there if there is none."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / _NAME
    if not file.exists():
        if (folder / "offsets").exists() or any((folder / "spark").glob("offsets/*")):
            raise PipelineError(
                f"{folder} holds a Spark checkpoint without {_NAME}, so there is no telling which "
                "store it belongs to: name another folder, or put the file back from a backup"
            )
        _create(file, {"id": uuid.uuid4().hex, "stream": stream, "store": store_id})
    try:
        facts = json.loads(file.read_text("utf-8"))
        found = Checkpoint(folder, facts["id"], facts["store"])
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
    return found


def _decoded(path: str) -> str:
    """A file's name: the log has it encoded as in a URL."""
    return "file:" + urllib.parse.unquote(urllib.parse.urlsplit(path).path)


def _log_offset(file: Path) -> int:
    offset: int = json.loads(file.read_text("utf-8").splitlines()[-1])["logOffset"]
    return offset


def _entries(folder: Path, offset: int) -> list[dict[str, Any]]:
    file = folder / str(offset)
    if not file.exists():
        file = folder / f"{offset}.compact"
    return _lines(file)


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()[1:]]


def _latest(folder: Path) -> int | None:
    try:
        numbers = [int(each.name) for each in folder.iterdir() if each.name.isdecimal()]
    except FileNotFoundError:
        return None
    return max(numbers, default=None)


def _create(file: Path, facts: dict[str, str]) -> None:
    """In one piece and for good, or not at all; one that another process has made meanwhile stays.

    Whoever comes second reads the first one's: two ids in turn would make one stream look like two.
    """
    temporary = file.with_name(f".{file.name}-{uuid.uuid4().hex}")
    with temporary.open("w", encoding="utf-8") as stream:
        json.dump(facts, stream)
        stream.flush()
        os.fsync(stream.fileno())
    try:
        os.link(temporary, file)
    except FileExistsError:
        return
    finally:
        temporary.unlink()
    handle = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
