"""The state of a stream: files that batches keep for later ones.

Three kinds: spans that wait for a partner, the ids of spans that were counted (the dedup index),
and the hosts that have answered, or have not.
A batch writes them before its commit, which names the files in use; so a batch that is run again
starts from the same ones. A file that no commit names is unused, and is removed.

    <checkpoint>/state/<batch>-<unique>-<parts>/pending/*.arrow
    <checkpoint>/state/<batch>-<unique>-<parts>/ids/*.arrow
    <checkpoint>/state/<batch>-<unique>-<parts>/hosts/*.arrow

On another file system they are Parquet files of blobs (:mod:`batchmill.spark.files.remote`).

:mod:`batchmill.spark.files.statefiles` says what is in them. Version 1 had Parquet files of spans
in ``carry/<batch>-<unique>``, and of ids in ``seen/<batch>-<unique>``; such files are read until
they expire.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

from batchmill.files import sync
from batchmill.spans import MOST_HOSTS, KnownHosts
from batchmill.spark.errors import PipelineError
from batchmill.spark.files import remote
from batchmill.spark.files.paths import AnyPath, HadoopPath, file_at, is_uri, remove_tree
from batchmill.spark.files.statefiles import (
    StateFile,
    StateKind,
    StatePiece,
    read_hosts,
    state_rows,
)
from batchmill.spark.input.segments import local_path, spark_path
from batchmill.spark.settings import PipelineSettings
from batchmill.store import StreamFile
from batchmill.wording import count_of

_OLD = {"carry": StateKind.PENDING, "seen": StateKind.IDS}
"""The folders of version 1."""
_PENDING_SLOTS = 8
"""Files of pending spans are merged so that about this many remain over the whole wait."""
_ID_SLOTS = 4
"""Ids are merged within a quarter of the window: none is kept longer than that beyond it."""
_AHEAD_S = 3600.0
"""A clock that goes back by less makes files wait so much longer."""
_WORDS = {
    StateKind.PENDING: ("span that waits for its partner", "spans that wait for their partner"),
    StateKind.IDS: ("id of a span that was counted", "ids of spans that were counted"),
    StateKind.HOSTS: ("host that was called", "hosts that were called"),
}
_OTHERWISE = {
    StateKind.PENDING: "be lost",
    StateKind.IDS: "be counted again",
    StateKind.HOSTS: "be counted for the wrong destination",
}


@dataclass(frozen=True)
class StateFiles:
    """The files that a batch starts from, oldest first."""

    pending: tuple[StreamFile, ...] = ()
    ids: tuple[StreamFile, ...] = ()
    expire_all: bool = False
    """Whether no span is to wait any longer."""
    hosts: tuple[StreamFile, ...] = ()

    @classmethod
    def of(cls, files: Iterable[StreamFile], *, expire_all: bool = False) -> StateFiles:
        """Sort files by kind."""
        files = tuple(files)
        pending = tuple(file for file in files if kind_of(file) is StateKind.PENDING)
        ids = tuple(file for file in files if kind_of(file) is StateKind.IDS)
        hosts = tuple(file for file in files if kind_of(file) is StateKind.HOSTS)
        return cls(pending, ids, expire_all, hosts)

    def known_hosts(self, folder: AnyPath) -> KnownHosts | None:
        """What is known about hosts; None: nothing, or too many have answered.

        ``folder`` is that of the state: on another file system than this machine's, no hosts are
        kept.
        """
        if not isinstance(folder, Path):
            return None
        hosts = read_hosts(Path(local_path(file.path) or file.path) for file in self.hosts)
        return hosts if len(hosts.answering) <= MOST_HOSTS else None


def new_name(number: int, parts: int) -> str:
    """A name for what a batch keeps."""
    return f"{number}-{uuid.uuid4().hex[:8]}-{parts}"


def kind_of(file: StreamFile) -> StateKind:
    """What a file holds, by its folders."""
    above, last = file.path.rstrip("/").rsplit("/", 2)[-2:]
    return _OLD[above] if above in _OLD else StateKind(last)


def name_of(file: StreamFile) -> str:
    """The name that a batch gave to what it kept."""
    above, last = file.path.rstrip("/").rsplit("/", 2)[-2:]
    return last if above in _OLD else above


def is_old(file: StreamFile) -> bool:
    """Whether version 1 wrote the file."""
    return file.path.rstrip("/").rsplit("/", 2)[-2] in _OLD


def parts_of(file: StreamFile) -> int:
    """Into how many parts the traces of a file are divided; 0 if version 1 wrote it."""
    return 0 if is_old(file) else int(name_of(file).rsplit("-", 1)[-1])


def to_read(files: Iterable[StreamFile], merged: Iterable[StreamFile]) -> list[StateFile]:
    """Files as tasks read them; those of ``merged`` go into the state of their batch."""
    paths = {file.path for file in merged}
    return [
        StateFile(
            kind_of(file),
            local_path(file.path) or file.path,
            parts_of(file),
            file.path in paths,
        )
        for file in files
    ]


def publish(
    pieces: Iterable[StatePiece],
    folder: AnyPath,
    number: int,
    tick: int,
    blobs: DataFrame | None = None,
) -> list[StreamFile]:
    """Give the files that tasks have written to ``folder`` their final names, durably.

    On another file system, let Spark write what the tasks have returned as ``blobs``.
    """
    by_kind: dict[StateKind, list[StatePiece]] = {}
    for piece in sorted(pieces, key=lambda piece: piece.path):
        by_kind.setdefault(piece.kind, []).append(piece)
    files = []
    for kind, own in by_kind.items():
        rows = sum(piece.rows for piece in own)
        if not rows:
            continue
        place = folder / kind
        files.append(StreamFile(spark_path(place), number, tick, rows))
        if isinstance(place, HadoopPath):
            assert blobs is not None
            remote.write_state(blobs, kind, place)
            continue
        place.mkdir()
        for piece in own:
            Path(piece.path).rename(place / piece.name)
        sync(place)
    if files and isinstance(folder, Path):
        for above in (folder, *folder.parents[:2]):  # the first batch has made the state's folder
            sync(above)
    return files


def expired_ms(tick: float, settled: float | None, settings: PipelineSettings) -> float:
    """Pending spans that arrived until then, in ms, have waited long enough.

    While older input waits, from the time ``settled`` on, partners may be in there: the wait is
    over when all that was written until its end was read, but after twice the time in any case.
    """
    wait_ms = settings.span_wait_s * 1000
    now = tick if settled is None else max(min(tick, settled * 1000), tick - wait_ms)
    return now - wait_ms


def expired_ids(files: Iterable[StreamFile], tick: int, window_ms: int) -> list[StreamFile]:
    """The files of the dedup index whose ids are older than the window."""
    return [file for file in files if file.arrived_ms <= tick - window_ms]


def clock_step(moved_s: float, passed_s: float | None, window_s: float) -> float:
    """By how much the clock was set while it moved by ``moved_s``; 0: by too little to matter.

    ``passed_s`` is the time that has passed meanwhile; None: not known, as another process was
    there before. Then half of the window has passed at most: ids live through one restart.
    """
    if passed_s is None:
        passed_s = max(0.0, min(moved_s, window_s / 2))
    step_s = moved_s - passed_s
    return step_s if abs(step_s) > window_s / _ID_SLOTS else 0.0


def shifted(files: Iterable[StreamFile], seconds: float) -> tuple[StreamFile, ...]:
    """Files as if they had arrived by a clock that was set since."""
    by_ms = round(seconds * 1000)
    return tuple(replace(file, arrived_ms=file.arrived_ms + by_ms) for file in files)


def are_ahead(files: Iterable[StreamFile], now: float) -> bool:
    """Whether files come from the future: the clock was ahead when they were written.

    ``now`` is in seconds since 1970.
    """
    return any(file.arrived_ms > (now + _AHEAD_S) * 1000 for file in files)


def pending_to_merge(
    files: Sequence[StreamFile], *, tick: int, wait_ms: int, expire: bool
) -> list[StreamFile]:
    """Which files of pending spans, oldest first, to merge into one with those of this ``tick``.

    Where files expire, only files of one time slot are merged. In a backfill all of them stay, so
    the newest are merged, as long as none is larger than those after it: the number of files grows
    with the logarithm of the number of batches, and so does how often a row is written. How many
    spans this batch has is not known yet: it is taken for the size of the newest file.
    """
    if expire:
        slot_ms = max(1, wait_ms // _PENDING_SLOTS)
        merged = [file for file in files if file.arrived_ms // slot_ms == tick // slot_ms]
    else:
        merged, total = [], files[-1].rows if files else 0
        for file in reversed(files):
            if file.rows > total:
                break
            merged.insert(0, file)
            total += file.rows
    return merged if len(merged) >= _PENDING_SLOTS else []


def ids_to_merge(
    files: Sequence[StreamFile], *, tick: int, window_ms: int, expire: bool
) -> list[StreamFile]:
    """Which files of ids, oldest first, to merge into one with those of this ``tick``.

    The newest ones, as long as none is more than twice as large as all after it: the rest shrink
    from file to file, so their number grows with the logarithm of the number of batches, and so
    does how often an id is written. The newest alone is left for the next batch: how many ids this
    one has is not known yet.
    """
    slot_ms = max(1, window_ms // _ID_SLOTS)
    merged: list[StreamFile] = []
    total = 0
    for file in reversed(files):
        if expire and file.arrived_ms // slot_ms != tick // slot_ms:
            break
        if merged and file.rows > 2 * total:
            break
        merged.insert(0, file)
        total += file.rows
    return merged if len(merged) > 1 else []


def check_files(files: Iterable[StreamFile], spark: SparkSession | None = None) -> None:
    """Raise if any of ``files`` is damaged: its spans would be lost or counted twice silently.

    ``spark`` opens those on another file system. Without it, they are not checked.
    """
    files = list(files)
    away = [file for file in files if is_uri(file.path)]
    are_whole = spark is None or not away or _are_whole(away, spark)
    for file in files:
        if are_whole and is_uri(file.path):
            continue
        path = file_at(file.path, spark)
        if (why := _fault(path, file.rows, spark, old=is_old(file))) is not None:
            kind = kind_of(file)
            raise PipelineError(
                f"{count_of(file.rows, *_WORDS[kind])} should be in {path}, but {why}. The store "
                f"has a commit that needs them, and without them spans would {_OTHERWISE[kind]}: "
                "somebody removed or changed them, or the disk lost them. Restore the folder from "
                "a copy; or restore store and checkpoint, both from the same copy; or start with "
                "an empty store and checkpoint"
            )


def remove_unused(checkpoint: AnyPath, used: Iterable[StreamFile]) -> None:
    """Remove the files that are not ``used``: no commit names them, nobody will read them.

    By their names in the checkpoint, which may have been moved to another place. What tasks have
    left that were run again goes, too.
    """
    names = {_short(file.path) for file in used}
    for place in ("state", *_OLD):
        for folder in _folders(checkpoint / place):
            inner = _folders(folder) if place == "state" else []
            if not any(_short(str(path)) in names for path in (folder, *inner)):
                remove_tree(folder)
                continue
            for path in inner:
                if _short(str(path)) not in names:
                    remove_tree(path)
        if place in _OLD and isinstance(checkpoint, Path):
            with contextlib.suppress(OSError):  # it is not empty, or not there
                (checkpoint / place).rmdir()


def _short(path: str) -> str:
    """The last two names of a path, which tell all files of a checkpoint apart."""
    return "/".join(path.rstrip("/").rsplit("/", 2)[-2:])


def _folders(place: AnyPath) -> list[AnyPath]:
    return list(place.iterdir()) if place.is_dir() else []


def _are_whole(files: Sequence[StreamFile], spark: SparkSession) -> bool:
    """Whether files on another file system have all rows: one look at all of them."""
    folders = [file_at(file.path, spark) for file in files]
    if not all(folder.is_dir() for folder in folders):
        return False
    return remote.state_rows(spark, folders) == sum(file.rows for file in files)


def _fault(folder: AnyPath, rows: int, spark: SparkSession | None, *, old: bool) -> str | None:
    if not folder.is_dir():
        return "it is gone"
    try:
        if not isinstance(folder, Path):
            assert spark is not None
            actual = remote.state_rows(spark, [folder])
        elif old:
            actual = sum(pq.read_metadata(file).num_rows for file in folder.glob("*.parquet"))
        else:
            actual = sum(map(state_rows, folder.glob("*.arrow")))
    except (pa.ArrowException, OSError) as error:
        return f"it cannot be read ({error})".replace("\n", " ")
    return None if actual == rows else f"it holds {actual:,}"
