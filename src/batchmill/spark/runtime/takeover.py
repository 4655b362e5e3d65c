"""Reads the checkpoints of version 1, in which Spark kept the books.

    <checkpoint>/spark/offsets/<batch>          up to where the input belongs to that batch
    <checkpoint>/spark/commits/<batch>          the batch is done
    <checkpoint>/spark/sources/0/<n>[.compact]  for a spool: the log of files
    <checkpoint>/spark/sources/0/0              for a topic: the offsets that it began with

The log of files has a line for each segment that was ever read, which may be millions. It is read
once, block by block, and only names of segments that still exist are kept. Then the folder is
removed: a checkpoint has books of one kind only.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import urllib.parse
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchmill.spark.errors import PipelineError
from batchmill.spark.runtime.books import Account, Plan

FOLDER = "spark"
_REMOVED = "removed.json"
"""Up to where segments were removed; not needed any more."""
_ENTRIES = re.compile(
    rb'^\{"path":"file://([^"\\%]+)","timestamp":\d+,"batchId":(\d+)\}$', re.MULTILINE
)
"""Entries of the log of files whose names need no decoding; others take longer."""
_BLOCK_BYTES = 2**18
_UNREADABLE = (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError)


@dataclass(frozen=True)
class Marks:
    """How far a stream has come."""

    done: int | None = None
    """The last batch that is marked as done."""
    planned: int | None = None
    """The newest batch whose input is written down; it may not be done yet."""


def is_in(checkpoint: Path) -> bool:
    """Whether Spark has written to the folder."""
    return (checkpoint / "offsets").exists() or any((checkpoint / FOLDER).glob("offsets/*"))


def marks_of(checkpoint: Path) -> Marks:
    """How far Spark has come; quick, however large its log of files is."""
    spark = checkpoint / FOLDER
    return Marks(_latest(spark / "commits"), _latest(spark / "offsets"))


def account_of(
    checkpoint: Path, present: Callable[[], Set[str]], now: float, parts: int
) -> Account:
    """What Spark's files say.

    ``present`` gives the paths of the segments that exist. ``now`` and ``parts`` are for a batch
    that Spark has planned, and that is not done.
    """
    marks = marks_of(checkpoint)
    if marks.planned is None:
        return Account()
    spark = checkpoint / FOLDER
    try:
        done = {} if marks.done is None else _offsets(spark, marks.done)
        planned = _offsets(spark, marks.planned)
        account = Account(marks.done)
        plan = Plan(marks.planned, now, parts)
        if "logOffset" in planned:
            names = _add_files(
                account, spark, done.get("logOffset", -1), planned["logOffset"], present()
            )
            plan = Plan(marks.planned, now, parts, tuple(names))
        else:
            ((topic, ends),) = planned.items()
            began = done.get(topic) if done else _initial(spark).get(topic)
            account.offsets = {topic: _whole_numbers(done.get(topic, {}))}
            first = _whole_numbers(began or {})
            offsets = {
                partition: (first.get(partition, 0), end)
                for partition, end in _whole_numbers(ends).items()
                if end > first.get(partition, 0)
            }
            plan = Plan(marks.planned, now, parts, topic=topic, offsets=offsets)
        account.plan = plan if marks.planned != marks.done else None
        return account
    except _UNREADABLE as error:
        raise PipelineError(
            f"the checkpoint of version 1 in {spark} cannot be taken over ({error}): restore "
            "checkpoint and store, both from the same copy; or start with an empty checkpoint "
            "folder and an empty store"
        ) from error


def remove(checkpoint: Path) -> None:
    """Remove Spark's files: the books have what is needed of them."""
    shutil.rmtree(checkpoint / FOLDER, ignore_errors=True)
    with contextlib.suppress(OSError):
        (checkpoint / _REMOVED).unlink()


def _add_files(
    account: Account, spark: Path, done: int, planned: int, present: Set[str]
) -> list[str]:
    """Put the files up to the offset ``done`` into the account; gives those up to ``planned``."""
    names: list[str] = []
    wanted = {path.encode() for path in present}
    for file in _log_files(spark / "sources" / "0", planned):
        for entries in _entries(file):
            if max(map(int, {offset for _, offset in entries})) <= done:
                # The usual case, and of millions of entries, so without a look at each.
                account.segments += len(entries)
                account.read |= {path.decode() for path in wanted.intersection(dict(entries))}
                continue
            for path, offset in entries:
                if int(offset) <= done:
                    account.segments += 1
                    if path in wanted:
                        account.read.add(path.decode())
                elif int(offset) <= planned:
                    names.append(path.decode())
    return sorted(names)


def _log_files(log: Path, until: int) -> list[Path]:
    """The files of Spark's log of files that have all entries up to an offset."""
    compacted = [
        int(file.name.removesuffix(".compact"))
        for file in log.glob("*.compact")
        if file.name.removesuffix(".compact").isdecimal()
    ]
    # Spark may be ahead with its log: then the newest one has entries beyond the offset.
    newest = max(compacted, default=-1)
    files = [log / f"{newest}.compact"] if compacted else []
    return [*files, *(log / str(offset) for offset in range(newest + 1, until + 1))]


def _entries(file: Path) -> Iterator[list[tuple[bytes, bytes]]]:
    """The entries of a file of the log, many at a time: a path, and the offset it belongs to."""
    with file.open("rb") as log:
        if log.readline().strip() != b"v1":
            raise ValueError(f"{file} is not of version v1")
        while block := log.read(_BLOCK_BYTES) + log.readline():
            entries = _ENTRIES.findall(block)
            if len(entries) != block.rstrip(b"\n").count(b"\n") + 1:  # not every line is one
                lines = filter(None, map(bytes.strip, block.splitlines()))
                entries = list(map(_decoded, lines))
            if entries:
                yield entries


def _decoded(line: bytes) -> tuple[bytes, bytes]:
    """An entry whose name may have any characters."""
    entry = json.loads(line)
    path = urllib.parse.unquote(urllib.parse.urlsplit(entry["path"]).path)
    return path.encode(), b"%d" % entry["batchId"]


def _offsets(spark: Path, number: int) -> dict[str, Any]:
    """Where the input of a batch ends."""
    text = (spark / "offsets" / str(number)).read_text("utf-8")
    offsets: dict[str, Any] = json.loads(text.splitlines()[-1])
    return offsets


def _initial(spark: Path) -> dict[str, Any]:
    """The offsets that a topic was begun with."""
    text = (spark / "sources" / "0" / "0").read_text("utf-8")
    offsets: dict[str, Any] = json.loads(text.splitlines()[-1])
    return offsets


def _whole_numbers(offsets: dict[str, Any]) -> dict[int, int]:
    return {int(partition): int(offset) for partition, offset in offsets.items()}


def _latest(folder: Path) -> int | None:
    try:
        numbers = [int(file.name) for file in folder.iterdir() if file.name.isdecimal()]
    except FileNotFoundError:
        return None
    return max(numbers, default=None)
