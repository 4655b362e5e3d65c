"""Files of state, as tasks read and write them.

A file has what one task kept: rows sorted by part, as one Arrow batch that a reader maps into its
memory, so that it takes from the disk only the columns that it uses. The parts and their rows are
in the file's metadata; its name says which of how many tasks wrote it, so that others need not
open it: ``3-8.arrow`` has the parts 3, 11, 19 … (Older versions only numbered them.)

A task writes files under hidden names. The driver gives those of the task that counts their final
names: what a task leaves behind that was run again is never read.
"""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain, zip_longest
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from batchmill.files import sync
from batchmill.spans import MOST_HOSTS, KnownHosts, ids_of, read_summary
from batchmill.spark.shuffle import Blob, Kind, Share, by_part, trace_parts, used_texts

_METADATA = b"batchmill.parts"


class StateKind(StrEnum):
    """What a file of state holds."""

    PENDING = "pending"
    """Summaries of spans that wait for a partner."""
    IDS = "ids"
    """The ids of spans that were counted."""
    HOSTS = "hosts"
    """The hosts that have answered, and those that have not: see :mod:`batchmill.spans.hosts`."""


@dataclass(frozen=True)
class StateFile:
    """What one batch kept of one kind, as the tasks of a later batch read it."""

    kind: StateKind
    folder: str
    parts: int
    """Into how many parts its traces are divided; 0: version 1 wrote it, which had no parts."""
    merged: bool
    """Whether it goes into this batch's state."""


@dataclass(frozen=True)
class StatePiece:
    """A file that a task has written."""

    kind: StateKind
    path: str
    rows: int
    name: str = ""
    """Its final name."""


def state_blobs(kind: StateKind, table: pa.Table, part: int) -> Iterator[Blob]:
    """State for later batches, in blobs; the source of each is the number of its rows."""
    for blob in Blob.of(Kind(kind), table, part=part):
        yield replace(blob, source=str(blob.table.num_rows))


def state_of(blob: Blob) -> StateFile:
    """Where a blob of earlier state comes from; its source is set if it goes into the new state."""
    return StateFile(StateKind(blob.kind), "", 0, bool(blob.source))


def read_state(file: StateFile, share: Share) -> list[tuple[int, pa.Table]]:
    """The tables of a task's parts.

    Ids do not tell their trace: of a file with other parts, a task gets all ids, as its first part.
    """
    if not file.parts:
        table = pq.read_table(file.folder, use_threads=False, partitioning=None)
        convert = ids_of if file.kind is StateKind.IDS else read_summary
        return [
            (part, convert(rows))
            for part, rows in by_part(table, trace_parts(table, share.parts))
            if part in share.own
        ]
    tables = []
    for path in sorted(Path(file.folder).glob("*.arrow")):
        if file.parts == share.parts and not _may_share(path, share):
            continue
        with pa.memory_map(str(path)) as source:
            table = pa.ipc.open_file(source).read_all()
        for part, first, rows in json.loads(table.schema.metadata[_METADATA]):
            piece = table.slice(first, rows)
            if file.parts == share.parts:
                if part in share.own:
                    tables.append((part, piece))
            elif file.kind is StateKind.IDS:
                tables.append((share.task, piece))
            else:
                divided = by_part(piece, trace_parts(piece, share.parts))
                tables += [(own, some) for own, some in divided if own in share.own]
    return tables


def _may_share(path: Path, share: Share) -> bool:
    """Whether a file may have parts of a task's, by its name."""
    task, _, tasks = path.stem.partition("-")
    common = math.gcd(int(tasks or 1), share.tasks)
    return int(task) % common == share.task % common


def write_state(
    kind: StateKind, tables: Mapping[int, pa.Table], folder: Path, task: int = 0, tasks: int = 1
) -> StatePiece:
    """Write the tables of a task's parts to a file with a hidden name."""
    places, first = [], 0
    for part, table in tables.items():
        places.append((part, first, table.num_rows))
        first += table.num_rows
    whole = used_texts(concat(list(tables.values())))
    whole = whole.replace_schema_metadata({_METADATA: json.dumps(places).encode()})

    def write(table: pa.Table, path: Path) -> None:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)

    path = write_hidden(whole, folder, write)
    return StatePiece(kind, str(path), first, f"{task}-{tasks}.arrow")


def write_hidden(table: pa.Table, folder: Path, write: Callable[[pa.Table, Path], object]) -> Path:
    """Write a file durably under a name that readers ignore."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f".{uuid.uuid4().hex}.part"
    try:
        write(table, path)
        sync(path)
    except OSError:  # a full disk should not be filled by what nobody reads
        path.unlink(missing_ok=True)
        raise
    return path


def write_hosts(hosts: KnownHosts, folder: Path) -> StatePiece:
    """Write what is known about hosts; the driver does.

    A row for each: null of one that has answered, else how often calls to it were given up. Of too
    many that have answered, so many that this can be seen.
    """
    answering = sorted(hosts.answering)[: MOST_HOSTS + 1]
    names = [*answering, *hosts.unanswered]
    counts = [*[None] * len(answering), *hosts.unanswered.values()]
    columns = {"host": pa.array(names, pa.string()), "given_up": pa.array(counts, pa.int32())}
    return write_state(StateKind.HOSTS, {0: pa.table(columns)}, folder)


def read_hosts(folders: Iterable[Path]) -> KnownHosts:
    """What is known about hosts. Older versions kept only those that have answered."""
    counts: dict[str, int | None] = {}
    for path in chain.from_iterable(folder.glob("*.arrow") for folder in folders):
        with pa.memory_map(str(path)) as source:
            columns = pa.ipc.open_file(source).read_all().to_pydict()
        counts.update(zip_longest(columns["host"], columns.get("given_up", ())))
    answering = frozenset(host for host, count in counts.items() if count is None)
    unanswered = {host: count for host, count in counts.items() if count is not None}
    return KnownHosts(answering, unanswered)


def state_rows(path: Path) -> int:
    """How many rows a file of state has."""
    with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as file:
        return sum(file.get_batch(number).num_rows for number in range(file.num_record_batches))


def concat(tables: Sequence[pa.Table]) -> pa.Table:
    """Several tables as one, each column in one piece."""
    if len(tables) == 1:
        return tables[0].combine_chunks()
    return pa.concat_tables(tables, promote_options="permissive").combine_chunks()
