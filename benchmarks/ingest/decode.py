"""Processor time to decode requests: the compiled decoder and the reference, protobuf and JSON.

python -m benchmarks.ingest.decode
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from batchmill.ingest import Decoded, Limits, decode_traces
from batchmill.ingest.decode import compiled
from batchmill.ingest.decode.json import read_json
from batchmill.ingest.decode.protobuf import read_proto
from batchmill.ingest.decode.rows import Rows
from batchmill.spool import PackedSpans, SpanBatch
from batchmill.spool.rows import SpanTable, encode, joined_spans
from benchmarks.ingest.bodies import as_json, bodies, random_of
from benchmarks.kit.report import Table, say, spread

SPANS = 500
REQUESTS = 20
"""Requests of a segment."""
REFERENCE, COMPILED = "in Python", "compiled"
DECODE, SEGMENT = "decoded", "decoded, as a segment"
FORMS = {"protobuf": "application/x-protobuf", "JSON": "application/json"}
LIMITS = Limits()

Decode = Callable[[bytes], Decoded]
Case = tuple[str, str]
"""Form, and what is done."""


@dataclass
class Decoding:
    """Processor seconds for a million spans, by case and decoder, one for each round."""

    seconds: dict[Case, dict[str, list[float]]] = field(default_factory=dict)
    span_bytes: dict[str, float] = field(default_factory=dict)

    def ratios(self, case: Case) -> list[float]:
        """How many times as quick the compiled decoder is, within each round."""
        both = self.seconds[case]
        return [slow / quick for slow, quick in zip(both[REFERENCE], both[COMPILED], strict=True)]

    def ratio(self, case: Case) -> float:
        return median(self.ratios(case))

    def tables(self) -> list[Table]:
        rounds = len(next(iter(self.seconds.values()))[COMPILED])
        rows = [
            [
                f"{form}, {work}",
                *(f"{median(both[name]):.2f}" for name in (REFERENCE, COMPILED)),
                f"{self.ratio((form, work)):.1f}x",
                spread(self.ratios((form, work)), 1),
            ]
            for (form, work), both in self.seconds.items()
        ]
        sizes = ", ".join(f"{size:.0f} bytes of {form}" for form, size in self.span_bytes.items())
        return [
            Table(
                "Decoding",
                f"Processor seconds for a million spans, {SPANS} a request, ten attributes each"
                f" ({sizes} a span); medians of {rounds} rounds, one thread, the decoders in turn."
                f" A segment is the Arrow table of {REQUESTS} requests, encoded as Parquet.",
                ["", REFERENCE, COMPILED, "ratio", "range"],
                rows,
            )
        ]

    def as_json(self) -> dict[str, Any]:
        return {
            "spans": SPANS,
            "requests": REQUESTS,
            "span_bytes": self.span_bytes,
            "cases": [
                {"case": f"{form}, {work}", "ratios": self.ratios((form, work)), **both}
                for (form, work), both in self.seconds.items()
            ],
        }


def measure(*, rounds: int = 7) -> Decoding:
    """Take turns."""
    if compiled.library() is None:
        raise RuntimeError("there is no compiled decoder: install batchmill with a C compiler")
    rng = random_of(7)
    now = time.time_ns()
    sent = [body.fresh(rng, now) for body in bodies(REQUESTS, SPANS)]
    requests = {"protobuf": sent, "JSON": [as_json(body) for body in sent]}
    result = Decoding()
    for form, chosen in requests.items():
        result.span_bytes[form] = sum(map(len, chosen)) / (SPANS * REQUESTS)
    for number in range(-1, rounds):  # what is loaded at first use does not count
        say(f"decoding: round {number + 1} of {rounds}")
        for form, chosen in requests.items():
            for work in (DECODE, SEGMENT):
                both = result.seconds.setdefault((form, work), {REFERENCE: [], COMPILED: []})
                for name, decode in _decoders(form).items():
                    seconds = _seconds(chosen, decode, as_segment=work == SEGMENT)
                    if number >= 0:
                        both[name].append(seconds)
    return result


def _decoders(form: str) -> dict[str, Decode]:
    read = read_json if form == "JSON" else read_proto

    def reference(body: bytes) -> Decoded:
        rows = Rows(LIMITS)
        read(body, rows)
        return rows.decoded()

    return {
        REFERENCE: reference,
        COMPILED: lambda body: decode_traces(body, FORMS[form], LIMITS),
    }


def _seconds(requests: Sequence[bytes], decode: Decode, *, as_segment: bool) -> float:
    start = time.process_time()
    waiting: list[SpanTable | PackedSpans] = []
    for body in requests:
        batch = decode(body).batch
        if as_segment:
            waiting.append(SpanTable(batch) if isinstance(batch, SpanBatch) else batch)
    if as_segment:
        encode(joined_spans(waiting))
    return (time.process_time() - start) / (SPANS * REQUESTS) * 1e6


def main() -> None:
    """Print the table."""
    for table in measure().tables():
        print(table.render())


if __name__ == "__main__":
    main()
