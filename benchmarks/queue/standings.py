"""Results of the throughput benchmark: rates, ratios within a repeat, and their tables."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from benchmarks.kit.report import Table, said, spread
from benchmarks.queue.contenders import (
    MILL,
    MILL_BULK,
    MILL_BULK_TIGHT,
    MILL_LOOP,
    MILL_MIXED,
    MILL_TIGHT,
    Contender,
)
from benchmarks.queue.peers import BOUND, CONSUMERS, MAX_BATCH
from benchmarks.queue.work import CHUNK, CLASS_COUNT, PRODUCER_COUNTS

RATED = (MILL, MILL_TIGHT, MILL_BULK, MILL_BULK_TIGHT)

CAPTION = f"""
1, 4 and 16 producers, {CLASS_COUNT} classes with Zipf rates, blocking, {CONSUMERS} consumer threads
(OpenTelemetry has one of its own), batches of at most {MAX_BATCH:,}; every item was consumed and
checked. 'batchmill' holds {BOUND:,} items in each partition, as its users run it; 'tight' holds
{BOUND:,} in all, as the bounded peers do; 'queue.Queue, roomy' holds as many as 'batchmill'.
'SimpleQueue each' gives each consumer a queue and each class a consumer, to keep order.
produce_many takes {CHUNK:,} items of one class a call ('mixed': of any class). 'In order': in this
run each producer's items of each class arrived in the order it produced them.
"""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One timed run of one contender."""

    contender: str
    producers: int
    repeat: int
    items: int
    seconds: float
    ordered: bool

    @property
    def rate(self) -> float:
        """Million items a second."""
        return self.items / self.seconds / 1e6


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """How many times as fast one contender is as another."""

    per_count: dict[int, float]
    """By number of producers: the median over repeats of the ratio within a repeat."""
    paired: list[float]
    """Every ratio within a repeat, of all producer counts."""

    @property
    def median(self) -> float:
        """The median over the producer counts, which the goals are about."""
        return median(self.per_count.values())


@dataclass(kw_only=True)
class Throughput:
    """All samples of a run, and who could not take part."""

    contenders: list[Contender]
    repeats: int
    samples: list[Sample] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)

    def rates(self, name: str, producers: int) -> list[float]:
        """One rate a repeat."""
        return [s.rate for s in self.samples if (s.contender, s.producers) == (name, producers)]

    def ratio(self, name: str, peer: str) -> Ratio | None:
        """``name`` over ``peer``; None where one of them is missing."""
        if name in self.missing or peer in self.missing:
            return None
        per_count, paired = {}, []
        for producers in PRODUCER_COUNTS:
            both = zip(self.rates(name, producers), self.rates(peer, producers), strict=True)
            ratios = [mine / theirs for mine, theirs in both]
            per_count[producers] = median(ratios)
            paired += ratios
        return Ratio(per_count=per_count, paired=paired)

    def tables(self) -> list[Table]:
        """The rates, then batchmill's ratios: item by item and in bulk, at both capacities."""
        rated = (self._ratio_table(name) for name in RATED)
        return [self._rate_table(), *rated, self._ratio_table(MILL_MIXED, MILL_LOOP)]

    def _rate_table(self) -> Table:
        rows = []
        for contender in self.contenders:
            if contender.name in self.missing:
                rows.append([contender.name, "missing", *["-"] * (len(PRODUCER_COUNTS) + 2)])
                continue
            rates = {count: self.rates(contender.name, count) for count in PRODUCER_COUNTS}
            ordered = all(s.ordered for s in self.samples if s.contender == contender.name)
            rows.append(
                [
                    contender.name,
                    "none" if contender.capacity is None else f"{contender.capacity:,}",
                    *(f"{median(rates[count]):.2f}" for count in PRODUCER_COUNTS),
                    spread(rate for per_count in rates.values() for rate in per_count),
                    "yes" if ordered else "no",
                ]
            )
        counts = [f"{count} prod." for count in PRODUCER_COUNTS]
        return Table(
            "Throughput, million items/s from produce to consumed",
            f"Median of {self.repeats} interleaved repeats. {CAPTION.strip()} {said(self.missing)}",
            ["contender", "bound", *counts, "min..max", "in order"],
            rows,
        )

    def _ratio_table(self, name: str, *peers: str) -> Table:
        rows = []
        for peer in peers or [c.name for c in self.contenders if not c.is_mill]:
            ratio = self.ratio(name, peer)
            if ratio is not None:
                rows.append(
                    [
                        peer,
                        *(f"{ratio.per_count[count]:.2f}x" for count in PRODUCER_COUNTS),
                        f"{ratio.median:.2f}x",
                        spread(ratio.paired),
                    ]
                )
        return Table(
            f"How many times as fast '{name}' is",
            "Ratios are taken within a repeat; the median is over the three producer counts.",
            ["as", *(f"{count} prod." for count in PRODUCER_COUNTS), "median", "min..max"],
            rows,
        )

    def as_json(self) -> dict[str, Any]:
        """Every sample, and every ratio of a batchmill row."""
        return {
            "repeats": self.repeats,
            "missing": self.missing,
            "capacity": {c.name: c.capacity for c in self.contenders},
            "samples": [{**asdict(s), "million_items_per_s": s.rate} for s in self.samples],
            "ratios": {
                name: {
                    peer.name: {**ratio.per_count, "median": ratio.median}
                    for peer in self.contenders
                    if not peer.is_mill and (ratio := self.ratio(name, peer.name)) is not None
                }
                for name in RATED
            },
        }
