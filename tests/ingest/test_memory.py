"""Small requests that would take much memory: bounded by what was sent, and counted as it is."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import gc
import gzip
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchmill.ingest.decode import (
    Decoded,
    Limits,
    TooLarge,
    check_held,
    decode_traces,
    decompress,
)
from batchmill.ingest.decode.compiled import CompiledSpans
from batchmill.ingest.intake import Intake, ReceiverSettings
from batchmill.ingest.responses import Refusal
from batchmill.ingest.stats import ReceiverStats
from batchmill.kafka import encode as as_messages
from batchmill.spool import SEGMENT_COLUMNS, SPAN_SOURCE, SpanBatch, Spool
from tests.ingest.kit import (
    JSON,
    PROTOBUF,
    Group,
    S,
    as_json,
    decoder,
    decoding_in,
    protobuf,
    take,
    zstd,
)
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


def alike(count: int, resource_size: int, size: int) -> Group:
    """Spans of honest senders that compress well: traces of ten, one right after the other."""
    resource = [
        ("service.name", "cart"),
        *((f"k8s.{n}", f"a value {n}") for n in range(resource_size)),
    ]
    attributes = [("http.route", "/cart"), *((f"attribute {n}", "some value") for n in range(size))]
    spans, parent, trace, time = [], b"", b"", 1_760_000_000_000_000_000
    for place in range(count):
        if place % 10 == 0:
            trace, parent = CHANCE.randbytes(16), b""
        own = CHANCE.randbytes(8)
        time += CHANCE.randrange(1_000_000)
        end = time + CHANCE.randrange(10_000_000)
        spans.append(S(trace, own, parent, start=time, end=end, attributes=attributes))
        parent = own
    return Group(spans, resource)


def counted(count: int) -> Group:
    """Spans of a load generator, whose ids are numbers."""
    return Group([S(n.to_bytes(16), n.to_bytes(8)) for n in range(1, count + 1)])


def in_all_columns(count: int) -> Group:
    """Spans with the same long text in each attribute that has a column of its own."""
    texts = [f"{place} ".ljust(4000, "\N{SNOWMAN}") for place in range(count)]
    return Group(
        [
            S(CHANCE.randbytes(16), CHANCE.randbytes(8), attributes=[(key, text) for key in KEYS])
            for text in texts
        ]
    )


KEYS = [*SEGMENT_COLUMNS][:40]
REQUESTS = {
    "usual": lambda: [usual(500)],
    "large": lambda: [usual(3000)],
    "many resources": lambda: [usual(20) for _ in range(100)],
    "large resource": lambda: [Group(some_spans(2000), large_resource())],
    "large resource, few spans": lambda: [Group(some_spans(400), large_resource())],
    "many large resources": lambda: [Group(some_spans(20), large_resource(n)) for n in range(8)],
    "many attributes": lambda: [Group(some_spans(9000), [(f"k{n}", "") for n in range(128)])],
    "alike": lambda: [Group(some_spans(17_400))],
    "alike, of a Collector": lambda: [alike(3000, 60, 10)],
    "alike, of large spans": lambda: [alike(1500, 20, 40)],
    "counted": lambda: [counted(17_000)],
    "one resource each": lambda: [Group([S()], [("a", str(n))]) for n in range(8000)],
    "in all columns": lambda: [in_all_columns(40)],
    "the same span": lambda: [Group([S()] * 25_000)],
    "odd spans": lambda: [Group(some_spans(2000, ODD), large_resource())],
}
TAKEN = (
    *("usual", "large", "many resources", "alike", "alike, of a Collector"),
    *("alike, of large spans", "counted"),
)
"""Those that honest senders send."""


CASES = [
    *(("compiled", form, name) for form in (PROTOBUF, JSON) for name in REQUESTS),
    *(("python", PROTOBUF, name) for name in REQUESTS),
    *(("python", JSON, name) for name in ("usual", "large resource", "odd spans")),
]
"""The decoder in Python keeps the same rows of both forms: a few requests show that."""


@functools.cache
def sent_as(name: str, form: str) -> tuple[bytes, int]:
    """The body of a request, and how many bytes it has when it is compressed."""
    body = (protobuf if form == PROTOBUF else as_json)(*REQUESTS[name]())
    return body, len(gzip.compress(body))


@pytest.fixture(scope="module", autouse=True)
def _bodies() -> Iterator[None]:
    yield
    sent_as.cache_clear()


@pytest.mark.parametrize(("decoder", "form", "name"), CASES, indirect=["decoder"])
@pytest.mark.usefixtures("decoder")
def test_a_request_holds_no_more_than_twenty_times_its_bytes(name: str, form: str) -> None:
    """And 1 MiB; others are refused. What is counted is what is held."""
    body, sent = sent_as(name, form)
    decode_traces(protobuf(usual(1)), PROTOBUF, Limits())  # what is kept for all requests
    before = allocated_bytes()
    try:
        decoded = decode_traces(body, form, Limits())
        check_held(decoded.batch.weight, decoded.written_bytes, sent)
    except TooLarge:
        assert name not in TAKEN
        return
    counted = decoded.batch.weight
    waiting = waiting_spans(decoded)
    del decoded
    held = allocated_bytes() - before
    assert held <= 1.05 * counted + 100_000
    assert held <= 20 * sent + MIB + 100_000
    assert waiting.weight <= counted


@pytest.mark.parametrize("form", [PROTOBUF, JSON])
@pytest.mark.parametrize("name", REQUESTS)
def test_messages_of_a_request_are_bounded_before_they_are_made(name: str, form: str) -> None:
    """By twenty times the bytes that were sent and 64 MiB, though each span has its resource."""
    body, sent = sent_as(name, form)
    try:
        decoded = decode_traces(body, form, Limits(), packed=False)
        check_held(decoded.batch.weight, decoded.written_bytes, sent, packed=False)
    except TooLarge:
        assert name not in TAKEN
        return
    batch, counted = decoded.batch.unpacked(), decoded.written_bytes
    del decoded
    before = allocated_bytes()
    messages = as_messages(batch)
    held = allocated_bytes() - before
    assert sum(len(message.value) for message in messages) <= counted
    assert held <= 1.05 * counted + 100_000
    assert held <= 20 * sent + 64 * MIB + 100_000


@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.usefixtures("decoder")
def test_what_a_table_takes_is_known_before_it_is_made(name: str) -> None:
    """So that a segment is bounded in bytes, and a request while it is written."""
    decoded = decode_traces(sent_as(name, PROTOBUF)[0], PROTOBUF, Limits())
    waiting = waiting_spans(decoded)
    size = joined_spans([waiting]).get_total_buffer_size()
    assert 0.9 * size < waiting.table_bytes < 1.2 * size
    assert 0.9 * size < decoded.written_bytes < 1.2 * size


def waiting_spans(decoded: Decoded) -> SpanTable | CompiledSpans:
    """The spans in the form in which they wait for their segment."""
    batch = decoded.batch
    if isinstance(batch, SpanBatch):
        return SpanTable(batch)
    assert isinstance(batch, CompiledSpans)
    return batch


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
def test_a_body_has_no_more_than_twenty_times_its_bytes_without_compression(
    encoding: str, tmp_path: Path
) -> None:
    """And 16 MiB: one resource in 120 groups is refused, though no limit of a request is met."""
    group = protobuf(Group(some_spans(1), large_resource()))
    plain = group * 120
    assert len(plain) < Limits().max_decompressed_bytes
    body = zstd(plain) if encoding == "zstd" else gzip.compress(plain)
    with pytest.raises(TooLarge, match=f"more than {20 * len(body) + 16 * MIB} bytes"):
        decompress(body, encoding, Limits())
    with Spool(tmp_path) as spool:
        intake = Intake(spool, Limits(), ReceiverSettings(), ReceiverStats())
        with pytest.raises(Refusal) as refused:
            asyncio.run(take(intake, body, encoding))
        intake.close()
    assert (refused.value.status, refused.value.reason) == (413, "too_large")


@pytest.mark.parametrize("pack", [gzip.compress, zstd])
@pytest.mark.parametrize("form", [PROTOBUF, JSON])
@pytest.mark.parametrize("name", TAKEN)
def test_bodies_of_honest_senders_are_decompressed(
    name: str, form: str, pack: Callable[[bytes], bytes]
) -> None:
    """Also in JSON, where attributes that are alike in all spans compress a hundred times."""
    body, _ = sent_as(name, form)
    encoding = "zstd" if pack is zstd else "gzip"
    assert decompress(pack(body), encoding, Limits()) == body


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def allocated_bytes() -> int:
    """What C and Arrow have allocated, and Python for large objects."""
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _Mallinfo
    info = libc.mallinfo2()
    return int(info.uordblks + info.hblkhd + pa.total_allocated_bytes())


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
    bodies = [
        gzip.compress(protobuf(Group(some_spans(count, attributes), large_resource())))
        for count, attributes in ((2000, ()), (2000, ODD), (400, ODD), (250, ODD))
    ]
    for language in ("python", "compiled"):
        home = tmp_path / language
        with ingest(home, "--linger", "0.2", env={"BATCHMILL_DECODER": language}) as running:

            def resident_mib(pid: int = running.process.pid) -> int:
                status = Path(f"/proc/{pid}/status").read_text()
                line = next(x for x in status.splitlines() if x.startswith("VmHWM"))
                return int(line.split()[1]) // 1024

            assert running.post(protobuf(usual(500))).status == 200
            before = resident_mib()
            for body in bodies:
                answer = running.post(body, content_encoding="gzip")
                assert answer.status in (200, 413)
            assert resident_mib() - before < 120
