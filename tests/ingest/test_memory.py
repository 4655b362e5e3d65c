"""Small requests that would take much memory: bounded by what was sent, and counted as it is."""

from __future__ import annotations

import gzip
import random
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchmill.ingest.decode import Limits, TooLarge, check_held, decode_traces
from batchmill.spool import SPAN_SOURCE, SpanBatch, Spool
from tests.ingest.kit import JSON, PROTOBUF, Group, S, as_json, decoder, decoding_in, protobuf
from tests.kit.events import SpanTable, encode, joined_spans
from tests.kit.ingest import MIB, ingest
from tests.kit.threads import WAIT_S

__all__ = ["decoder"]

CHANCE = random.Random(20)
ODD = (("a", "1"), ("a", "2"))
"""Attributes that the compiled decoder leaves to the reference."""


def large_resource(number: int = 0) -> Sequence[tuple[str, str]]:
    """127 attributes of 4 KiB."""
    return [(f"key {number} {place}", f"{place}".ljust(4096, "x")) for place in range(127)]


def some_spans(count: int, attributes: Sequence[tuple[str, str]] = ()) -> list[S]:
    """Spans with ids of their own."""
    return [
        S(CHANCE.randbytes(16), CHANCE.randbytes(8), attributes=attributes) for _ in range(count)
    ]


def usual(count: int) -> Group:
    """Spans as senders send them: twenty attributes of the resource, ten of each span."""
    resource = [("service.name", "cart"), *((f"k8s.{n}", f"a value {n}" * 4) for n in range(20))]
    attributes = [("http.route", "/cart"), *((f"attribute {n}", "some value") for n in range(10))]
    return Group(some_spans(count, attributes), resource)


REQUESTS = {
    "usual": lambda: [usual(500)],
    "large": lambda: [usual(8000)],
    "many resources": lambda: [usual(20) for _ in range(100)],
    "large resource": lambda: [Group(some_spans(2000), large_resource())],
    "large resource, few spans": lambda: [Group(some_spans(400), large_resource())],
    "many large resources": lambda: [Group(some_spans(20), large_resource(n)) for n in range(8)],
    "many attributes": lambda: [Group(some_spans(9000), [(f"k{n}", "") for n in range(128)])],
    "alike": lambda: [Group(some_spans(17_400))],
    "the same span": lambda: [Group([S()] * 50_000)],
    "odd spans": lambda: [Group(some_spans(2000, ODD), large_resource())],
}
TAKEN = ("usual", "large", "many resources", "alike", "the same span")
"""Those that honest senders send."""


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("form", [PROTOBUF, JSON])
@pytest.mark.usefixtures("decoder")
def test_a_request_holds_no_more_than_twenty_times_its_bytes(name: str, form: str) -> None:
    """And 16 MiB; others are refused. What is counted is what is held."""
    groups = REQUESTS[name]()
    body = (protobuf if form == PROTOBUF else as_json)(*groups)
    sent = len(gzip.compress(body))
    before = pa.total_allocated_bytes()
    try:
        batch = decode_traces(body, form, Limits()).batch
        check_held(batch.weight, sent)
    except TooLarge:
        if name in TAKEN:
            raise
        return
    assert batch.weight <= 20 * sent + 16 * MIB
    if isinstance(batch, SpanBatch):
        held = SpanTable(batch)
        assert pa.total_allocated_bytes() - before <= 1.1 * batch.weight + 100_000
        assert held.weight <= 20 * sent + 16 * MIB


@pytest.mark.usefixtures("decoder")
def test_a_resource_is_kept_once() -> None:
    """Though each of its spans has it, for whoever reads the segment."""
    resource = large_resource()[:40]
    batch = decode_traces(protobuf(Group(some_spans(200), resource)), PROTOBUF, Limits()).batch
    part = SpanTable(batch) if isinstance(batch, SpanBatch) else batch
    table = joined_spans([part])
    copies = 200 * 40 * 4096
    assert table.nbytes < copies / 20
    data = encode(table)
    assert pa.types.is_string(pq.read_schema(pa.BufferReader(data)).field("service").type)
    rows = pq.read_table(pa.BufferReader(data), columns=["resource"])["resource"]
    assert rows.to_pylist() == [list(resource)] * 200


def test_spans_of_both_decoders_share_a_segment(tmp_path: Path) -> None:
    """Without a copy of the resource for each of them."""
    bodies = [
        protobuf(Group(some_spans(50, attributes), [*large_resource(), ("service.name", name)]))
        for name, attributes in (("a", ()), ("b", ODD))
    ]
    with decoding_in("compiled"):
        compiled = decode_traces(bodies[0], PROTOBUF, Limits()).batch
    with decoding_in("python"):
        reference = decode_traces(bodies[1], PROTOBUF, Limits()).batch
    table = joined_spans([compiled, SpanTable(reference)])  # type: ignore[list-item, arg-type]
    assert table.nbytes < 10 * MIB
    with Spool(tmp_path, linger_s=0.2) as spool:
        stored = [spool.submit(SPAN_SOURCE, batch) for batch in (compiled, reference)]
        paths = {future.result(WAIT_S) for future in stored}
    services = [pq.read_table(path, columns=["service"])["service"].to_pylist() for path in paths]
    assert sorted(name for names in services for name in names) == ["a"] * 50 + ["b"] * 50


def test_a_receiver_stays_small(tmp_path: Path) -> None:
    """Requests of 58 KB that took a gigabyte, decoded in Python as in C."""
    for language in ("python", "compiled"):
        home = tmp_path / language
        with ingest(home, "--linger", "0.2", env={"BATCHMILL_DECODER": language}) as running:

            def resident_mib(pid: int = running.process.pid) -> int:
                status = Path(f"/proc/{pid}/status").read_text()
                line = next(x for x in status.splitlines() if x.startswith("VmHWM"))
                return int(line.split()[1]) // 1024

            assert running.post(protobuf(usual(500))).status == 200
            before = resident_mib()
            for count, attributes in ((2000, ()), (2000, ODD), (400, ODD), (250, ODD)):
                body = protobuf(Group(some_spans(count, attributes), large_resource()))
                answer = running.post(gzip.compress(body), content_encoding="gzip")
                assert answer.status in (200, 413)
            assert resident_mib() - before < 120
