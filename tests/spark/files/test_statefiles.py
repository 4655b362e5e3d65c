"""Files of state as tasks read and write them: each task gets what belongs to its parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("pyspark")

from batchmill.spans import ids_of
from batchmill.spark.files.state import publish, to_read
from batchmill.spark.files.statefiles import StateFile, StateKind, read_state, write_state
from batchmill.spark.shuffle import Share, by_part, trace_parts

PARTS, TASKS = 8, 3
SPANS = pa.table(
    {
        "trace_id": [f"trace {number % 40}" for number in range(100)],
        "span_id": [f"span {number}" for number in range(100)],
        "name": pa.array([f"op {number % 7}" for number in range(100)]).dictionary_encode(),
        "batch": [1] * 100,
        "settled": [number % 2 == 0 for number in range(100)],
    }
)


def kept(folder: Path, kind: StateKind) -> StateFile:
    """What the tasks of a batch keep of the spans."""
    target = folder / "state" / f"1-abc-{PARTS}"
    pieces = []
    parts = dict(by_part(SPANS, trace_parts(SPANS, PARTS)))
    for task in range(TASKS):
        own = {part: parts[part] for part in Share(PARTS, TASKS, task).own if part in parts}
        if kind is StateKind.IDS:
            own = {part: ids_of(rows) for part, rows in own.items()}
        pieces.append(write_state(kind, own, target, task, TASKS))
    # A task that was run again: what the first attempt wrote is not published.
    write_state(kind, {0: SPANS.slice(0, 5)}, target)
    files = publish(pieces, target, 1, 0)
    assert [file.rows for file in files] == [100]
    (file,) = to_read(files, ())
    assert (file.kind, file.parts, file.merged) == (kind, PARTS, False)
    return file


def numbered(folder: Path, kind: StateKind) -> StateFile:
    """The same with the names that files had before: they do not tell the task."""
    file = kept(folder, kind)
    for task in range(TASKS):
        path = Path(file.folder) / f"{task}-{TASKS}.arrow"
        path.rename(path.with_name(f"{task}.arrow"))
    return file


def old(folder: Path, kind: StateKind, drop: tuple[str, ...] = ()) -> StateFile:
    """The same as version 1 kept it, without some columns."""
    table = SPANS.set_column(2, "name", SPANS["name"].cast(pa.string())).drop_columns(list(drop))
    if kind is StateKind.IDS:
        table = table.select(["trace_id", "span_id"])
    for number in range(2):
        pq.write_table(table.slice(50 * number, 50), folder / f"part-{number}.parquet")
    return StateFile(kind, str(folder), 0, False)


def spans_in(tables: list[tuple[int, pa.Table]]) -> Counter[tuple[str, str, str]]:
    """The spans of tables."""
    return Counter(
        (row["trace_id"], row["span_id"], row["name"])
        for _, table in tables
        for row in table.select(["trace_id", "span_id", "name"]).to_pylist()
    )


def all_ids(tables: list[tuple[int, pa.Table]]) -> list[tuple[int, int]]:
    """The ids in tables, sorted."""
    return sorted((row["high"], row["low"]) for _, table in tables for row in table.to_pylist())


WHOLE = spans_in([(0, SPANS)])
IDS = all_ids([(0, ids_of(SPANS))])
SHARES = pytest.mark.parametrize(
    ("parts", "tasks"), [(8, 3), (8, 1), (8, 6), (8, 8), (5, 2), (16, 3), (1, 1)]
)
WRITERS = pytest.mark.parametrize(
    "write", [kept, numbered, old], ids=["new", "numbered", "version 1"]
)


@WRITERS
@SHARES
def test_each_pending_span_is_one_tasks(
    tmp_path: Path, write: Callable[..., StateFile], parts: int, tasks: int
) -> None:
    """That of its trace, whatever the number of parts was when it was written."""
    file = write(tmp_path, StateKind.PENDING)
    together: Counter[tuple[str, str, str]] = Counter()
    for task in range(tasks):
        share = Share(parts, tasks, task)
        tables = read_state(file, share)
        assert {part for part, _ in tables} <= set(share.own)
        for part, table in tables:
            assert set(trace_parts(table, parts)) == {part}
        together += spans_in(tables)
    assert together == WHOLE


@WRITERS
@SHARES
def test_each_task_knows_the_ids_of_its_traces(
    tmp_path: Path, write: Callable[..., StateFile], parts: int, tasks: int
) -> None:
    """Exactly those; all of them where the number of parts is another one."""
    file = write(tmp_path, StateKind.IDS)
    of_tasks = []
    for task in range(tasks):
        share = Share(parts, tasks, task)
        tables = read_state(file, share)
        assert {part for part, _ in tables} <= set(share.own)
        of_tasks.append(all_ids(tables))
    if file.parts in (0, parts):
        assert sorted(id_ for ids in of_tasks for id_ in ids) == IDS
    else:
        assert of_tasks == [IDS] * tasks


def test_a_task_opens_the_files_that_may_have_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that the same task of as many has written, or some of those of fewer and more."""
    file = kept(tmp_path, StateKind.IDS)
    opened: list[str] = []
    memory_map = pa.memory_map

    def note(path: str) -> Any:
        opened.append(Path(path).name)
        return memory_map(path)

    monkeypatch.setattr(pa, "memory_map", note)
    for tasks, names in (
        (3, ["1-3.arrow"]),
        (6, ["1-3.arrow"]),
        (2, [f"{n}-3.arrow" for n in range(3)]),
    ):
        opened.clear()
        read_state(file, Share(PARTS, tasks, 1))
        assert opened == names


def test_spans_of_version_1_have_the_columns_of_today(tmp_path: Path) -> None:
    """So that they can be merged with others; what it did not have is null."""
    (new,) = {
        table.schema.remove_metadata()
        for _, table in read_state(old(tmp_path, StateKind.PENDING), Share(1, 1, 0))
    }
    assert pa.types.is_dictionary(new.field("name").type)
    file = old(tmp_path, StateKind.PENDING, drop=("name",))
    ((_, table),) = read_state(file, Share(1, 1, 0))
    assert table.schema.remove_metadata() == new
    assert table["name"].null_count == table["broker"].null_count == 100
    assert table["settled"].to_pylist() == SPANS["settled"].to_pylist()
