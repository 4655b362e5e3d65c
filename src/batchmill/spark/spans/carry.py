"""The files that batches leave for later ones: written for good, checked, and kept few."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from batchmill.spark.errors import PipelineError
from batchmill.spark.input.segments import local_path
from batchmill.store import Carry

_SLOTS = 8
"""Files are merged so that about this many are left over the whole wait."""


def to_merge(
    alive: Sequence[Carry], *, tick: int, rows: int, wait_ms: int, expire: bool
) -> list[Carry]:
    """Those of ``alive``, oldest first, that go into one file with the ``rows`` of this ``tick``.

    Where files expire, only files of one time go together. In a backfill all of them stay, so the
    newest ones go together, as long as none is larger than those after it: the number of files
    grows with the logarithm of the number of batches, and so does how often a row is written.
    """
    if expire:
        slot_ms = max(1, wait_ms // _SLOTS)
        merged = [each for each in alive if each.arrived_ms // slot_ms == tick // slot_ms]
    else:
        merged, total = [], rows
        for each in reversed(alive):
            if each.rows > total:
                break
            merged.insert(0, each)
            total += each.rows
    return merged if len(merged) >= _SLOTS else []


def make_durable(folder: Path) -> None:
    """Have the disk keep a new folder and its files: the commit that names it will be kept."""
    for each in (*sorted(folder.iterdir()), folder, folder.parent, folder.parent.parent):
        handle = os.open(each, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def check(
    files: Iterable[Carry],
    what: str = "spans that wait for their partner",
    otherwise: str = "be lost",
) -> None:
    """Raise if any of ``files`` is not whole: what they stand for would go wrong in silence."""
    for each in files:
        path = local_path(each.path)
        if path is None:
            continue
        if (why := _fault(Path(path), each.rows)) is not None:
            raise PipelineError(
                f"{each.rows:,} {what} should lie in {path}, but {why}. The store has a commit "
                f"that counts on them, and without them spans would {otherwise}: somebody removed "
                "or changed them, or the disk lost them. Put the folder back from a copy; or put "
                "store and checkpoint back, both from the same copy; or start with an empty store "
                "and checkpoint"
            )


def _fault(folder: Path, rows: int) -> str | None:
    if not folder.is_dir():
        return "it is gone"
    try:
        found = sum(pq.read_metadata(each).num_rows for each in folder.glob("*.parquet"))
    except (pa.ArrowException, OSError) as error:
        return f"it cannot be read ({error})".replace("\n", " ")
    return None if found == rows else f"it holds {found:,}"
