"""The files that batches keep for later ones: spans that wait for a partner, and the dedup index.

Which files are in use is part of what the store commits, so a batch that is run again starts from
the same ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from batchmill.spark.errors import PipelineError
from batchmill.spark.input.segments import local_path
from batchmill.store import Carry
from batchmill.wording import count_of

_SLOTS = 8
"""Files are merged so that about this many remain over the whole wait."""


@dataclass(frozen=True)
class PendingFiles:
    """The files of earlier batches that a batch starts from, oldest first."""

    spans: tuple[Carry, ...] = ()
    """Spans that wait for a partner."""
    dedup: tuple[Carry, ...] = ()
    """Ids of spans that were counted."""
    expire_all: bool = False
    """Whether no span is to wait any longer."""


def to_merge(
    files: Sequence[Carry], *, tick: int, rows: int, wait_ms: int, expire: bool
) -> list[Carry]:
    """Which ``files``, oldest first, to merge into one with the ``rows`` of this ``tick``.

    Where files expire, only files of one time slot are merged. In a backfill all of them stay, so
    the newest are merged, as long as none is larger than those after it: the number of files grows
    with the logarithm of the number of batches, and so does how often a row is written.
    """
    if expire:
        slot_ms = max(1, wait_ms // _SLOTS)
        merged = [file for file in files if file.arrived_ms // slot_ms == tick // slot_ms]
    else:
        merged, total = [], rows
        for file in reversed(files):
            if file.rows > total:
                break
            merged.insert(0, file)
            total += file.rows
    return merged if len(merged) >= _SLOTS else []


def check_files(
    files: Iterable[Carry],
    noun: str = "span that waits for its partner",
    plural: str = "spans that wait for their partner",
    otherwise: str = "be lost",
) -> None:
    """Raise if any of ``files`` is damaged: its spans would be lost or doubled silently."""
    for file in files:
        path = local_path(file.path)
        if path is None:
            continue
        if (why := _fault(Path(path), file.rows)) is not None:
            raise PipelineError(
                f"{count_of(file.rows, noun, plural)} should be in {path}, but {why}. The store "
                f"has a commit that needs them, and without them spans would {otherwise}: somebody "
                "removed or changed them, or the disk lost them. Restore the folder from a copy; "
                "or restore store and checkpoint, both from the same copy; or start with an empty "
                "store and checkpoint"
            )


def _fault(folder: Path, rows: int) -> str | None:
    if not folder.is_dir():
        return "it is gone"
    try:
        actual = sum(pq.read_metadata(file).num_rows for file in folder.glob("*.parquet"))
    except (pa.ArrowException, OSError) as error:
        return f"it cannot be read ({error})".replace("\n", " ")
    return None if actual == rows else f"it holds {actual:,}"
