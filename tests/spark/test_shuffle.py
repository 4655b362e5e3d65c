"""What travels between the steps of a batch: tables in blobs, however many texts they have."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

pytest.importorskip("pyspark")

from batchmill.spark import shuffle
from batchmill.spark.batch.maker import _check_complete
from batchmill.spark.errors import PipelineError
from batchmill.spark.shuffle import (
    Blob,
    Kind,
    by_part,
    read_blobs,
    trace_parts,
    used_texts,
    write_blobs,
)


def texts(count: int) -> pa.Table:
    """As many rows, each with a text of its own, but every tenth without one."""
    values = [None if row % 10 == 9 else f"statement {row}" for row in range(count)]
    encoded = pa.array(values, pa.string()).dictionary_encode()
    return pa.table({"row": pa.array(range(count)), "text": encoded})


def test_a_part_of_a_table_has_only_its_own_texts() -> None:
    """Otherwise each part of the traces would carry the statements of all of them."""
    table = texts(1000)
    part = used_texts(table.slice(100, 100))
    assert part.to_pylist() == table.slice(100, 100).to_pylist()
    assert len(part["text"].combine_chunks().dictionary) <= 91
    assert part.schema == table.schema


def test_blobs_are_not_larger_than_what_they_hold() -> None:
    """However a table is divided, its parts together are about as large as the whole."""
    table = texts(20_000)
    (whole,) = Blob.of(Kind.SPANS, table)
    parts = by_part(table, np.arange(20_000) % 16)
    pieces = [blob for part, rows in parts for blob in Blob.of(Kind.SPANS, rows, part=part)]
    assert len(pieces) == 16
    assert sum(len(piece.data) for piece in pieces) < 1.2 * len(whole.data)


def test_a_large_table_becomes_several_blobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same rows in the same order."""
    table = texts(1000)
    monkeypatch.setattr(shuffle, "_MOST_BYTES", table.nbytes // 4)
    sent = list(read_blobs(write_blobs(Blob.of(Kind.SPANS, table, source="Span", part=3))))
    assert len(sent) >= 4
    assert {(blob.kind, blob.source, blob.part) for blob in sent} == {(Kind.SPANS, "Span", 3)}
    assert [row for blob in sent for row in blob.table.to_pylist()] == table.to_pylist()
    assert list(Blob.of(Kind.SPANS, table.slice(0, 0))) == []


def test_spans_without_a_trace_are_spread() -> None:
    """They have no partner, so all in one part would be a burden for nothing."""
    table = pa.table({"trace_id": pa.array([None, "a"] * 800, pa.string())})
    parts = trace_parts(table, 8)
    assert len(set(parts[1::2].tolist())) == 1
    assert set(parts[::2].tolist()) == {0, 2, 4, 6}


def test_rows_that_did_not_arrive_end_the_batch() -> None:
    """A stage that was run again may have read less than the first time."""
    _check_complete("spans", 5, 5)
    with pytest.raises(PipelineError, match=r"5,000 were sent to a step .* 4,999 arrived"):
        _check_complete("spans", 5000, 4999)
