"""Files of kept spans that cannot be read are left out, counted and reported once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchmill.store import open_store
from batchmill.traces import SpanKeeper, SpanReader, TraceQuery
from batchmill.traces.layout import INCOMING
from batchmill.traces.rewrite import read_segment
from tests.kit.traces.segments import HOUR, NOW, made_span, write_spans
from tests.web.kit import Client, serving_all

TIME = {"from": HOUR, "to": HOUR + 3600}


def _cut(whole: bytes) -> bytes:
    return whole[:64]


def _without_pages(whole: bytes) -> bytes:
    """The footer is right, what it describes is not."""
    footer = int.from_bytes(whole[-8:-4], "little") + 8
    return b"PAR1" + b"\xff" * (len(whole) - footer - 4) + whole[-footer:]


def _foreign(columns: dict[str, list[object]]) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink)
    return bytes(sink.getvalue())


def _other_types(whole: bytes) -> bytes:
    names = pq.read_schema(pa.BufferReader(whole)).names
    return _foreign({name: [1, 2] for name in names})


def _other_columns(whole: bytes) -> bytes:
    del whole
    return _foreign({"x": [1], "trace_id": ["1"]})


DAMAGE: list[Callable[[bytes], bytes]] = [
    _cut, _without_pages, _other_types, _other_columns, lambda _: b"", lambda _: b"no parquet",
]  # fmt: skip
NAMES = ["cut", "without pages", "other types", "other columns", "empty", "no parquet"]


@pytest.fixture(params=["sorted", "waiting"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Kept spans in two files, or in two segments that wait."""
    keeper = SpanKeeper(tmp_path / "traces", clock=lambda: NOW)
    for number in (1, 2):
        rows = [
            made_span(number, 1, name="GET /cart"),
            made_span(number, 2, 1, service="db", kind="CLIENT", name="SELECT"),
        ]
        keeper.take(write_spans(tmp_path, str(number), rows))
        if request.param == "sorted":
            keeper.tend(everything=True)
    return keeper.folder


def _damage(folder: Path, how: Callable[[bytes], bytes]) -> None:
    """Damage the file of the first trace."""
    files = [*folder.glob("hour=*/*.parquet"), *(folder / INCOMING).glob("*.parquet")]
    (first,) = (
        path for path in files if f"{1:032x}" in pq.read_table(path)["trace_id"].to_pylist()
    )
    first.write_bytes(how(first.read_bytes()))


@pytest.mark.parametrize("how", DAMAGE, ids=NAMES)
def test_a_damaged_file_is_left_out(
    folder: Path, how: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    """All that is asked is answered from the others."""
    _damage(folder, how)
    _check(SpanReader(folder), caplog)


@pytest.mark.parametrize("how", DAMAGE, ids=NAMES)
@pytest.mark.parametrize("folder", ["sorted"], indirect=True)
def test_a_file_may_be_damaged_after_it_was_opened(
    folder: Path, how: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    """Its footer is remembered, and its rows do not fit it any more."""
    reader = SpanReader(folder)
    assert reader.services()
    assert reader.unreadable_files == 0
    _damage(folder, how)
    _check(reader, caplog)


def _check(reader: SpanReader, caplog: pytest.LogCaptureFixture) -> None:
    query = TraceQuery(start_us=HOUR * 1_000_000, end_us=NOW * 1_000_000)
    for _ in range(2):
        trace_ids = [int(trace.trace_id, 16) for trace in reader.search(query).traces]
        assert trace_ids == [2]
        assert reader.trace("1") is None
        second = reader.trace("2")
        assert second is not None
        assert len(second.spans) == 2
        ids = [(f"{trace:032x}", f"{2:016x}") for trace in (1, 2)]
        reader.served_calls(ids, query.start_us, query.end_us)
        assert set(reader.examples(query.start_us, query.end_us, [])) <= {("shop", 0)}
        assert "shop" in reader.services()
        assert reader.unreadable_files == 1
    reports = [line for line in caplog.messages if "cannot be read" in line]
    assert len(reports) == 1


def test_a_file_that_is_removed_is_no_damage(folder: Path) -> None:
    """It was merged into another one, or dropped."""
    reader = SpanReader(folder)
    assert reader.services()
    for path in folder.rglob("*.parquet"):
        path.unlink()
    assert reader.trace("1") is None
    assert reader.unreadable_files == 0


@pytest.fixture
def client(folder: Path, tmp_path: Path) -> Iterator[Client]:
    """A server of these spans."""
    url = f"sqlite:///{tmp_path}/store.db"
    open_store(url).close()
    with serving_all(url, traces=folder) as client:
        yield client


@pytest.mark.parametrize("how", DAMAGE, ids=NAMES)
def test_the_api_answers_with_the_rest(
    client: Client, folder: Path, how: Callable[[bytes], bytes]
) -> None:
    """And says how many files are left out."""
    _damage(folder, how)
    answer = client.get("/api/v1/traces", **TIME)
    assert [int(trace["trace_id"], 16) for trace in answer["traces"]] == [2]
    assert answer["unreadable_files"] == 1
    assert client.ask("/api/v1/traces/1")[0] == 404
    assert len(client.get("/api/v1/traces/2")["spans"]) == 2
    assert client.get("/api/v1/traces/services")["unreadable_files"] == 1
    times = {"start": HOUR * 1_000_000, "end": (HOUR + 3600) * 1_000_000}
    assert len(client.get("/api/traces", service="shop", **times)["data"]) == 1


def test_the_rows_of_many_segments_are_not_all_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many may wait: those that were used last stay in memory, the others are read again."""
    keeper = SpanKeeper(tmp_path / "traces", clock=lambda: NOW)
    for number in range(8):
        keeper.take(write_spans(tmp_path, str(number), [made_span(number, 1)]))
    one = read_segment(write_spans(tmp_path, "one", [made_span(1, 1)]))[0].nbytes
    monkeypatch.setattr("batchmill.traces.files._MOST_BYTES", 3 * one)
    reader = SpanReader(keeper.folder)
    for _ in range(2):
        for number in range(8):
            assert reader.trace(str(number)) is not None
        tables = reader._cache._tables.values()
        assert 1 < len(tables) < 6
        assert sum(table.nbytes for table in tables) == reader._cache._table_bytes
