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
import shutil
import urllib.parse
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchmill.spark.errors import PipelineError
from batchmill.spark.input.books import Account, Plan

FOLDER = "spark"
_REMOVED = "removed.json"
"""Up to where segments were removed; not needed any more."""
_FILE = "file://"
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
        done = {} if marks.done is None else _offsets(spark / "offsets" / str(marks.done))
        planned = _offsets(spark / "offsets" / str(marks.planned))
        account = Account(marks.done)
        plan = Plan(marks.planned, now, parts)
        if "logOffset" in planned:
            names = _add_files(
                account, spark, done.get("logOffset", -1), planned["logOffset"], present()
            )
            plan = Plan(marks.planned, now, parts, tuple(names))
        else:
            ((topic, ends),) = planned.items()
            began = (done or _offsets(spark / "sources" / "0" / "0")).get(topic)
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
    wanted = {f"{_FILE}{path}".encode() for path in present}
    for file in _log_files(spark / "sources" / "0", planned):
        for addresses, offsets in _entries(file):
            if max(map(_number, set(offsets))) <= done:
                # The usual case, and of millions of entries, so without a look at each.
                account.segments += len(addresses)
                account.read.update(map(_path, wanted.intersection(addresses)))
                continue
            for address, offset in zip(addresses, map(_number, offsets), strict=True):
                if offset <= done:
                    account.segments += 1
                    if address in wanted:
                        account.read.add(_path(address))
                elif offset <= planned:
                    names.append(_path(address))
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


def _entries(file: Path) -> Iterator[tuple[list[bytes], list[bytes]]]:
    """The entries of a file of the log, many at a time: addresses, and the ends of their lines.

    A line is ``{"path":"file:///spool/1.parquet","timestamp":1,"batchId":2}``, so most are simply
    cut at the quotes: millions of them are read in seconds.
    """
    with file.open("rb") as log:
        if log.readline().strip() != b"v1":
            raise ValueError(f"{file} is not of version v1")
        while block := log.read(_BLOCK_BYTES) + log.readline():
            parts = block.split(b'"')
            lines = len(parts) // 8
            beginnings = block.count(b'{"path":"file:///')
            endings = block.count(b'"batchId":')
            if (
                len(parts) % 8 == 1
                and beginnings == endings == lines
                and not (b"\\" in block or b"%" in block)
            ):
                yield parts[3::8], parts[8::8]
            elif entries := list(map(_decoded, filter(None, map(bytes.strip, block.splitlines())))):
                yield [address for address, _ in entries], [end for _, end in entries]


def _decoded(line: bytes) -> tuple[bytes, bytes]:
    """An entry whose name may have any characters."""
    entry = json.loads(line)
    path = urllib.parse.unquote(urllib.parse.urlsplit(entry["path"]).path)
    return f"{_FILE}{path}".encode(), b"%d" % entry["batchId"]


def _number(end: bytes) -> int:
    """The offset at the end of a line."""
    return int(end.strip(b":}{\n"))


def _path(address: bytes) -> str:
    return address.decode().removeprefix(_FILE)


def _offsets(file: Path) -> dict[str, Any]:
    """Where the input of a batch ends, or where a topic was begun."""
    offsets: dict[str, Any] = json.loads(file.read_text("utf-8").splitlines()[-1])
    return offsets


def _whole_numbers(offsets: dict[str, Any]) -> dict[int, int]:
    return {int(partition): int(offset) for partition, offset in offsets.items()}


def _latest(folder: Path) -> int | None:
    try:
        numbers = [int(file.name) for file in folder.iterdir() if file.name.isdecimal()]
    except FileNotFoundError:
        return None
    return max(numbers, default=None)
