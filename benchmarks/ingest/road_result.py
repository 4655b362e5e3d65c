"""The results of a run over the whole path."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from benchmarks.ingest.senders import percentile
from benchmarks.kit.report import Table

GROWN, SLACK_S = 1.25, 1.0
"""The lag has grown if it is that many times, and that much, above what it was."""
KEEPS_UP = 0.95
"""Of what is asked for must be acknowledged."""


@dataclass(frozen=True)
class Lag:
    """The spool at one moment. Segments are removed one micro-batch after they are committed."""

    at_s: float
    segments: int
    bytes: int
    oldest_s: float


@dataclass
class Mark:
    """A marker: when it was sent, acknowledged, and seen in the store."""

    name: str
    sent: float
    acknowledged: float
    committed: float | None = None


@dataclass
class Step:
    """One rate for some time."""

    target: float
    """Spans a second that are to be sent; ``asked`` in the results."""
    seconds: float
    rate: float
    """Acknowledged spans a second."""
    committed_rate: float
    """Spans a second that came into the store meanwhile."""
    refused: int
    answers: list[float]
    """Seconds, sorted."""
    lags: list[Lag]
    marks: list[Mark]

    def third(self, number: int, name: str) -> float:
        """The median over the first, middle or last third."""
        size = max(1, len(self.lags) // 3)
        values: list[float] = [getattr(lag, name) for lag in self.lags[number * size :][:size]]
        return median(values)

    def growth(self, name: str) -> float:
        """From the middle third to the last; a spool that empties each time has not grown."""
        return self.third(2, name) / max(self.third(1, name), 1e-9)

    @property
    def sustained(self) -> bool:
        """Whether the lag stayed, and all was taken."""
        before, after = (self.third(number, "oldest_s") for number in (1, 2))
        stayed = after <= max(GROWN * before, before + SLACK_S)
        return stayed and self.rate >= KEEPS_UP * self.target

    def times(self) -> list[float]:
        """Seconds from sent to committed, sorted."""
        return sorted(mark.committed - mark.sent for mark in self.marks if mark.committed)

    def row(self) -> list[str]:
        times = self.times()
        return [
            f"{self.target:,.0f}",
            f"{self.rate:,.0f}",
            f"{self.committed_rate:,.0f}",
            *(f"{self.third(number, 'oldest_s'):.1f}" for number in range(3)),
            f"{percentile(times, 0.5):.1f}",
            f"{percentile(times, 0.95):.1f}",
            "yes" if self.sustained else "no",
        ]

    def as_json(self) -> dict[str, Any]:
        times, answers = self.times(), self.answers
        shares = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
        return {
            "asked": self.target,
            "seconds": self.seconds,
            "rate": self.rate,
            "committed_rate": self.committed_rate,
            "refused": self.refused,
            "sustained": self.sustained,
            "sent_to_committed": {name: percentile(times, share) for name, share in shares.items()},
            "answer": {name: percentile(answers, share) for name, share in shares.items()},
            "markers": len(self.marks),
            "markers_missing": sum(mark.committed is None for mark in self.marks),
            "lags": [asdict(lag) for lag in self.lags],
        }


_HEADERS = [
    *("target", "acknowledged", "committed", "lag, start", "middle", "end"),
    *("to committed, p50", "p95", "sustained"),
]


@dataclass
class Road:
    """The run, and the rates that were tried before it."""

    run: Step
    tried: list[Step]
    acknowledged: int
    counted: int
    trigger_s: float
    ingest_mib: float
    pipeline_mib: float

    def tables(self) -> list[Table]:
        run = self.run
        bytes_ = [f"{run.third(number, 'bytes') / 2**20:.1f}" for number in range(3)]
        sizes = [f"{run.third(number, 'segments'):.0f}" for number in range(3)]
        steps = []
        if self.tried:
            caption = f"Spans a second, each for {self.tried[0].seconds:g} s."
            rows = [step.row() for step in self.tried]
            steps = [Table("Rates tried", caption, _HEADERS, rows)]
        waits = ", ".join(
            f"{name} {value:.2f} s" for name, value in run.as_json()["answer"].items()
        )
        return [
            *steps,
            Table(
                "From sender to store",
                f"Spans per second for {run.seconds:g} s through batchmill ingest and batchmill"
                f" pipeline (dedup 10m, trigger {self.trigger_s:g} s, SQLite), with the senders"
                " on the same machine. Lag: the age of the oldest segment in the spool, in seconds,"
                " medians per third; segments stay one micro-batch longer than it takes to"
                f" commit them. From sent to committed, in seconds, by {len(run.marks)} marker"
                f" services. Response times: {waits}. Unread MiB {' / '.join(bytes_)}, segments"
                f" {' / '.join(sizes)}. In the end {self.acknowledged:,} spans were acknowledged"
                f" and {self.counted:,} counted. Memory: ingest {self.ingest_mib:.0f} MiB, pipeline"
                f" {self.pipeline_mib:,.0f} MiB.",
                _HEADERS,
                [run.row()],
            ),
        ]

    def as_json(self) -> dict[str, Any]:
        return {
            "run": self.run.as_json(),
            "tried": [step.as_json() for step in self.tried],
            "acknowledged": self.acknowledged,
            "counted": self.counted,
            "trigger_s": self.trigger_s,
            "ingest_mib": self.ingest_mib,
            "pipeline_mib": self.pipeline_mib,
        }
