"""Removing segments that were read: only what is in the store, and done in Spark's books, too.

A batch goes into the store first and is marked as done by Spark after that. Until then Spark may
ask for it again, so its segments stay. They are removed when the next batch begins, when the stream
ends, and now and then while it is idle. How far that has come is kept beside the checkpoint, so
what a crash leaves over is removed after the restart.

A segment that was set aside goes too, since the quarantine has a copy; where it could not be
copied, it stays.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import uuid
from pathlib import Path
from typing import Any

from batchmill.spark.input.segments import local_path
from batchmill.spark.runtime.checkpoint import Checkpoint

log = logging.getLogger("batchmill.spark")

_NAME = "removed.json"


class ReadSegments:
    """Removes the segments of one stream's spool. May be used by several threads."""

    def __init__(self, spool: Path, checkpoint: Checkpoint, quarantine: Path) -> None:
        self._spool = spool
        self._checkpoint = checkpoint
        self._quarantine = quarantine
        self._file = checkpoint.folder / _NAME
        self._lock = threading.Lock()
        self._told: set[str] = set()
        self._until = _offset_in(self._file)

    def remove(self, last: int | None) -> int:
        """Remove what can be, if ``last`` is the last batch in the store; how many it were."""
        with self._lock:
            done = self._checkpoint.committed
            if done is None or last is None:
                return 0
            until = self._checkpoint.log_offset(min(done, last))
            if until is None or until <= self._until:
                return 0
            paths = self._checkpoint.logged(self._until, until)
            if paths is None:
                return 0
            removed, left = self._remove(paths)
            if not left:
                # After a power cut no file may be back that this says is gone.
                for folder in {each.parent for each in removed}:
                    _sync(folder)
                write_json(self._file, {"offset": until}, durable=True)
                self._until = until
            return len(removed)

    def _remove(self, paths: list[str]) -> tuple[list[Path], int]:
        """Those that are gone now, and how many could not be removed."""
        removed, left = [], 0
        for each in paths:
            path = self._ours(each)
            if path is None or self._only_copy(path):
                continue
            try:
                path.unlink()
            except FileNotFoundError:
                continue
            except OSError as error:
                left += 1
                self._tell(each, f"cannot be removed ({error}): let this user write its folder")
                continue
            removed.append(path)
        return removed, left

    def _ours(self, name: str) -> Path | None:
        """The segment, if it lies in this spool: the books may be those of another."""
        local = local_path(name)
        if local is None:
            return None
        path = Path(local)
        return path if self._spool in path.parents and ".." not in path.parts else None

    def _only_copy(self, path: Path) -> bool:
        """Whether it was set aside, but the quarantine has just the reason."""
        copy = self._quarantine / path.parent.name / path.name
        if copy.exists() or not copy.with_name(f"{path.name}.reason").exists():
            return False
        if path.exists():
            self._tell(str(path), "stays: it was set aside, but the quarantine has no copy of it")
        return True

    def _tell(self, path: str, what: str) -> None:
        if path not in self._told:
            self._told.add(path)
            log.warning("the segment %s, which is in the store, %s", path, what)


def write_json(file: Path, facts: dict[str, Any], *, durable: bool = False) -> None:
    """In one piece, or not at all."""
    temporary = file.with_name(f".{file.name}-{uuid.uuid4().hex}")
    try:
        with temporary.open("w", encoding="utf-8") as stream:
            json.dump(facts, stream)
            if durable:
                stream.flush()
                os.fsync(stream.fileno())
        temporary.replace(file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        _sync(file.parent)


def _offset_in(file: Path) -> int:
    """-1 if it is not known: then the books are gone through from their beginning."""
    try:
        offset = json.loads(file.read_text("utf-8"))["offset"]
    except (OSError, ValueError, KeyError, TypeError):
        return -1
    return offset if isinstance(offset, int) else -1


def _sync(folder: Path) -> None:
    try:
        handle = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:  # somebody has cleaned up behind us
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
