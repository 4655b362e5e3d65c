"""The table of metrics in docs/telemetry.md: `python -m tests.docs.telemetry` writes it anew.

What a metric means is said once, beside the stats that it is read from; the page repeats it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from batchmill.alerts.stats import ALERTS
from batchmill.batcher.stats import BATCHER
from batchmill.flows.stats import FLOWS
from batchmill.pressure.stats import THRESHOLDS
from batchmill.queue.stats import QUEUE
from batchmill.telemetry import ComponentKind, Instrument, InstrumentKind
from batchmill.telemetry.registry import TELEMETRY
from batchmill.workers.stats import WORKERS
from tests.docs.kit import DOCS

PAGE = DOCS / "telemetry.md"
BEGIN = "<!-- The tables from here on are made by `python -m tests.docs.telemetry`. -->\n"
HEADING = "All metrics"

KINDS: dict[ComponentKind[Any], str] = {
    QUEUE: "Queues",
    BATCHER: "Micro-batchers",
    THRESHOLDS: "Thresholds",
    FLOWS: "Flows",
    WORKERS: "Workers (`Embedded`)",
    ALERTS: "Alerts",
    TELEMETRY: "The registry itself",
}


def made() -> str:
    """The tables."""
    return "\n".join([f"\n## {HEADING}", *(line for kind in KINDS for line in _lines(kind))]) + "\n"


def prometheus_name(kind: ComponentKind[Any], instrument: Instrument[Any]) -> str:
    """The name of a family as a page for Prometheus has it."""
    total = "_total" if instrument.kind is InstrumentKind.COUNTER else ""
    return kind.prometheus_name(instrument) + total


def _lines(kind: ComponentKind[Any]) -> Iterator[str]:
    yield from ("", f"### {KINDS[kind]}", "")
    yield "| Prometheus | OpenTelemetry | kind | unit | labels | meaning |"
    yield "|---|---|---|---|---|---|"
    for instrument in kind.instruments:
        name = kind.otel_name(instrument)
        otel = f"`{name}`"
        if instrument.kind is InstrumentKind.HISTOGRAM:
            otel = f"`{name}.count`, `{name}.sum`"
        labels = ", ".join(f"`{label}`" for label in kind.label_names(instrument))
        cells = (
            f"`{prometheus_name(kind, instrument)}`",
            otel,
            instrument.kind.value,
            f"`{instrument.unit}`",
            labels,
            instrument.help,
        )
        yield f"| {' | '.join(cells)} |"


def main() -> None:
    """Write the tables."""
    kept, _, _ = PAGE.read_text("utf-8").partition(BEGIN)
    PAGE.write_text(kept + BEGIN + made(), "utf-8")


if __name__ == "__main__":
    main()
