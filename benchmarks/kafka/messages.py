"""Compare message formats for a topic: protobuf, Arrow and JSON, on the same spans.

    python -m benchmarks.kafka.messages [--spans N] [--to kafka://host:port/topic]

For messages of one span and of a trace of ten: bytes of a span, before and after the producer's
compression of a megabyte of messages at once, and the processor's time that Python takes to encode
it. With ``--to``, the messages also go to that topic with each compression; it prints the rate.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter, process_time
from typing import Any

import numpy as np
import pyarrow as pa

from batchmill.ingest import Limits, decode_traces
from batchmill.kafka import KafkaSink, encode
from batchmill.spool import SPAN_COLUMNS, SPAN_SOURCE, SpanBatch, span_table
from benchmarks.ingest.bodies import bodies
from benchmarks.kit.machine import machine_line
from benchmarks.kit.report import Table, say

ROUNDS = 7
IN_A_REQUEST = 500
MEGABYTE = 1_000_000
SIZES = (1, 10)
COMPRESSIONS = ("none", "lz4", "zstd")

Encoder = Callable[[SpanBatch], list[bytes]]


def protobuf(batch: SpanBatch) -> list[bytes]:
    return [message.value for message in encode(batch)]


def arrow_stream(batch: SpanBatch) -> list[bytes]:
    """A message that anybody can read: with its schema."""
    return [_stream(trace) for trace in _traces(batch)]


def arrow_batch(batch: SpanBatch) -> list[bytes]:
    """Without the schema, which the reader would have to know."""
    return [trace.serialize().to_pybytes() for trace in _traces(batch)]


def as_json(batch: SpanBatch) -> list[bytes]:
    columns = [batch.columns[name] for name in SPAN_COLUMNS]
    traces: dict[str, list[dict[str, Any]]] = {}
    for values in zip(*columns, strict=True):
        span = dict(zip(SPAN_COLUMNS, values, strict=True))
        traces.setdefault(span["trace_id"], []).append(span)
    dumps = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
    return [dumps(spans).encode() for spans in traces.values()]


ENCODERS: dict[str, Encoder] = {
    "protobuf": protobuf,
    "Arrow, with schema": arrow_stream,
    "Arrow, without": arrow_batch,
    "JSON": as_json,
}


def _traces(batch: SpanBatch) -> list[pa.RecordBatch]:
    """A record batch for each trace; a request's traces lie one after the other."""
    whole = span_table(batch).combine_chunks().to_batches()[0]
    ids = batch.columns["trace_id"]
    starts = [at for at in range(len(ids)) if not at or ids[at] != ids[at - 1]]
    return [
        whole.slice(at, end - at) for at, end in zip(starts, [*starts[1:], len(ids)], strict=True)
    ]


def _stream(batch: pa.RecordBatch) -> bytes:
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(out.getvalue())


def requests(spans: int, in_a_trace: int) -> list[SpanBatch]:
    """Requests of the receivers' benchmark, decoded, with as many spans in each trace."""
    rng = np.random.default_rng(1)
    made = []
    for body in bodies(max(1, spans // IN_A_REQUEST), IN_A_REQUEST):
        data = body.fresh(rng, 1_780_000_000_000_000_000)
        batch = decode_traces(
            data, "application/x-protobuf", Limits(), packed=False
        ).batch.unpacked()
        ids = batch.columns["trace_id"]
        for at in range(0, len(ids), in_a_trace):
            of_trace = ids[at : at + in_a_trace]
            ids[at : at + in_a_trace] = [rng.bytes(16).hex()] * len(of_trace)
        made.append(batch)
    return made


def compressed(messages: Sequence[bytes], codec: str) -> int:
    """What the producer makes of them, a megabyte at a time."""
    part: list[bytes] = []
    total, size = 0, 0
    for message in [*messages, None]:
        if message is None or size + len(message) > MEGABYTE:
            total += len(pa.compress(b"".join(part), codec, asbytes=True))
            part, size = [], 0
        if message is not None:
            part.append(message)
            size += len(message)
    return total


def measure(spans: int) -> Table:
    rows = []
    for in_a_trace in SIZES:
        batches = requests(spans, in_a_trace)
        count = sum(map(len, batches))
        taken: dict[str, list[float]] = {name: [] for name in ENCODERS}
        for number in range(ROUNDS + 1):
            for name, encoder in ENCODERS.items():
                began = process_time()
                for batch in batches:
                    encoder(batch)
                if number:  # the first is a warm-up
                    taken[name].append(process_time() - began)
        for name, encoder in ENCODERS.items():
            messages = [message for batch in batches for message in encoder(batch)]
            sizes = [sum(map(len, messages)), *(compressed(messages, c) for c in ("lz4", "zstd"))]
            rows.append(
                [
                    f"{in_a_trace} span{'s' if in_a_trace > 1 else ''} a message: {name}",
                    f"{median(taken[name]) / count * 1e6:.1f} µs",
                    *(f"{size / count:,.0f}" for size in sizes),
                ]
            )
    caption = (
        f"{spans:,} spans in requests of {IN_A_REQUEST}; medians of {ROUNDS} rounds. Per span: "
        "the processor's time to encode it, and its bytes as they are and compressed."
    )
    return Table("Messages", caption, ["", "encode", "bytes", "lz4", "zstd"], rows)


def measure_topic(spans: int, address: str) -> Table:
    batches = requests(spans, 10)
    count = sum(map(len, batches))
    wall: dict[str, list[float]] = {name: [] for name in COMPRESSIONS}
    busy: dict[str, list[float]] = {name: [] for name in COMPRESSIONS}
    for number in range(ROUNDS + 1):
        for name in COMPRESSIONS:
            with KafkaSink(address, compression=name, capacity_rows=2 * count) as sink:
                sink.submit(SPAN_SOURCE, batches[0]).result()
                began, worked = perf_counter(), process_time()
                sent = [sink.submit(SPAN_SOURCE, batch) for batch in batches]
                for submission in sent:
                    submission.result()
                if number:
                    wall[name].append(perf_counter() - began)
                    busy[name].append(process_time() - worked)
    rows = [
        [name, f"{count / median(wall[name]):,.0f}", f"{median(busy[name]) / count * 1e6:.1f} µs"]
        for name in COMPRESSIONS
    ]
    caption = (
        f"{spans:,} spans, ten in a message, from memory until the broker has them all; and the "
        "processor's time that takes here, all threads, encoding and compression included."
    )
    return Table("To the topic", caption, ["compression", "spans/s", "busy, a span"], rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kafka.messages")
    parser.add_argument("--spans", type=int, default=20_000)
    parser.add_argument("--to", metavar="ADDRESS", help="also write to this topic")
    options = parser.parse_args(arguments)
    print(machine_line())
    print("\n" + measure(options.spans).render(), flush=True)
    if options.to:
        say("writing to the topic")
        print("\n" + measure_topic(options.spans, options.to).render(), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
