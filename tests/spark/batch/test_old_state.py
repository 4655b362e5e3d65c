"""State that version 1 left in a checkpoint: it is used like any other until it expires."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("pyspark")

from pyspark.sql import SparkSession

from batchmill.spans import compact
from batchmill.spark import Pipeline
from batchmill.spark.input.rows import check_spans
from batchmill.store import Batch, CommitResult, StreamFile
from tests.kit.pipelines import (
    NOW,
    counted,
    differences,
    expected,
    pipeline,
    stored,
    write_segment,
)
from tests.kit.spark import span
from tests.oracle.catalog import Row
from tests.oracle.generate import to_table
from tests.oracle.spans import spans_to_events

OAL = """
rel = from(ServiceRelation.latency).sum();
rel_micros = from(ServiceRelation.latencyMicros).sum();
ep_rel = from(EndpointRelation.*).count();
queue = from(MQAccess.*).count();
n = from(Service.*).count();
"""
TEXTS = ("trace_id", "span_id", "parent_span_id", "name", "kind")
SUMMARY = pa.schema(
    {
        **dict.fromkeys(TEXTS, pa.string()),
        "time": pa.timestamp("us", tz="UTC"),
        "latency": pa.int32(),
        "latencyMicros": pa.int64(),
        "status": pa.bool_(),
        **dict.fromkeys(("service", "instance", "type"), pa.string()),
        "httpResponseStatusCode": pa.int32(),
        "rpcStatusCode": pa.string(),
        **dict.fromkeys(("peer", "peer_layer", "broker", "broker_endpoint"), pa.string()),
        "batch": pa.int64(),
        "settled": pa.bool_(),
    }
)
"""The columns of pending spans in version 1."""
LATER = ("latencyMicros", "broker", "broker_endpoint")
"""Those that its first files did not have."""

CALL = span("1", "CLIENT", us=9000)
SERVED = span("4", parent_span_id="3", trace_id="t2", service="stock", us=2000)
LOST = span("5", "CLIENT", trace_id="t3")
EARLY = [CALL, SERVED, LOST]
"""None of these has its partner in the batch."""
PARTNERS = [
    span("2", parent_span_id="1", service="stock", us=4000),
    span("3", "CLIENT", trace_id="t2", us=3000),
]
WAIT_S, WINDOW_S = 300, 6000


class Version1:
    """Makes a batch's commit name state as version 1 has written it."""

    def __init__(self, running: Pipeline, spans: Sequence[Row], drop: Sequence[str] = ()) -> None:
        self._commit = running.store.commit
        self._checkpoint = running.checkpoint
        self._spans = spans
        self._drop = drop

    def __call__(self, batch: Batch) -> CommitResult:
        (tick,) = {file.arrived_ms for file in batch.add_files}
        checked = check_spans(to_table("Span", self._spans), 2**62).rows
        spans = compact(checked)
        rows = len(spans)
        columns: dict[str, Any] = {name: spans[name] for name in SUMMARY.names[:-2]}
        columns |= {"batch": [tick] * rows, "settled": [False] * rows}
        pending = pa.table(
            {name: pa.chunked_array(columns[name]).cast(kind) if name in spans.column_names
             else pa.array(columns[name], kind)
             for name, kind in zip(SUMMARY.names, SUMMARY.types, strict=True)}
        )  # fmt: skip
        ids = pending.select(["trace_id", "span_id"])
        batch.add_files[:] = [
            self._write("carry", pending.drop_columns(list(self._drop)), batch.number, tick),
            self._write("seen", ids, batch.number, tick),
        ]
        return self._commit(batch)

    def _write(self, place: str, table: pa.Table, number: int, tick: int) -> StreamFile:
        folder = Path(str(self._checkpoint), place, f"{number}-0123abcd")
        folder.mkdir(parents=True)
        pq.write_table(table.slice(0, 1), folder / "part-00000-x.snappy.parquet")
        pq.write_table(table.slice(1), folder / "part-00001-x.snappy.parquet")
        (folder / ".part-00000-x.snappy.parquet.crc").write_bytes(b"crc")
        (folder / "_SUCCESS").touch()
        return StreamFile(f"file:{folder}", number, tick, table.num_rows)


def old_folders(folder: Path) -> list[str]:
    """The folders of version 1 that are left."""
    checkpoint = folder / "checkpoint"
    return sorted(
        path.parent.name for name in ("carry", "seen") for path in checkpoint.glob(f"{name}/*")
    )


@pytest.mark.parametrize("drop", [(), LATER], ids=["whole", "first"])
def test_state_of_version_1_is_used_until_it_expires(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drop: Sequence[str]
) -> None:
    """Pairs across it are found, duplicates of it are dropped; then its files are removed."""
    spool = tmp_path / "spool"
    now = [NOW]
    settings: dict[str, Any] = {"oal": OAL, "dedup_s": WINDOW_S, "clock": lambda: now[0]}
    write_segment(spool, "Span", EARLY, "0")
    with pipeline(spark, tmp_path, **settings) as running:
        monkeypatch.setattr(running.store, "commit", Version1(running, EARLY, drop))
        running.run_available()
    assert old_folders(tmp_path) == ["carry", "seen"]

    write_segment(spool, "Span", [*PARTNERS, CALL], "1", 1)
    with pipeline(spark, tmp_path, **settings) as running:
        running.run_available()
        assert counted(running.store, "duplicates") == {("Span", "same trace and span id"): 1}
        spans = [*EARLY, *PARTNERS]
        wanted = expected(spans_to_events(spans).events, OAL)
        if drop:  # what was not kept cannot be summed up
            wanted = {key: value for key, value in wanted.items() if key[0] != "rel_micros"}
            actual = {
                key: value for key, value in stored(running.store).items() if key[0] != "rel_micros"
            }
        else:
            actual = stored(running.store)
        assert differences(actual, wanted) == []
        assert counted(running.store, "unresolved") == {}

        # The wait is over: what has no partner is given up, and its file goes. The ids stay.
        now[0] += WAIT_S
        later = span("9", trace_id="t9")
        write_segment(spool, "Span", [LOST, later], "2", 2)
        running.run_available()
        assert counted(running.store, "unresolved") == {("Span", "no destination"): 1}
        assert counted(running.store, "duplicates") == {("Span", "same trace and span id"): 2}
        assert "carry" not in old_folders(tmp_path)

        # From one run to the next, half of the window passes at most.
        for number, row in enumerate((span("8", trace_id="t8"), LOST), 3):
            now[0] += WINDOW_S / 2
            write_segment(spool, "Span", [row], str(number), number)
            running.run_available()
        assert old_folders(tmp_path) == []
        assert counted(running.store, "duplicates") == {("Span", "same trace and span id"): 2}
        assert counted(running.store, "rows")["Span", ""] == len(EARLY) + len(PARTNERS) + 3


def test_ids_of_version_1_are_merged(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into those of this version, which know them from then on."""
    spool = tmp_path / "spool"
    settings: dict[str, Any] = {"oal": OAL, "dedup_s": WINDOW_S, "clock": lambda: NOW}
    write_segment(spool, "Span", EARLY, "0")
    with pipeline(spark, tmp_path, **settings) as running:
        monkeypatch.setattr(running.store, "commit", Version1(running, EARLY))
        running.run_available()
    with pipeline(spark, tmp_path, **settings) as running:
        for number, spans in enumerate((PARTNERS, [CALL, SERVED], [*EARLY, *PARTNERS]), 1):
            write_segment(spool, "Span", spans, f"{number}", number)
            running.run_available()
        assert old_folders(tmp_path) == ["carry"]
        assert counted(running.store, "duplicates") == {("Span", "same trace and span id"): 7}
        assert counted(running.store, "rows")["Span", ""] == 5
