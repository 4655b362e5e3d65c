"""The tables of stats in docs/counters.md: `python -m tests.docs.stats` writes them anew.

What a field means is said once, in its docstring in the code; the page repeats it.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Iterator

from batchmill import BatchQueueManagerStats, BatchQueueStats, PartitionStats, ThreadLoad
from batchmill.alerts import AlertStats
from batchmill.batcher import BatcherStats
from batchmill.client import ClientStats
from batchmill.export import ExporterStats, RemoteWriteStats
from batchmill.flows import FlowStats, LatencyStats, WorkerStats
from batchmill.kafka import KafkaStats
from batchmill.pressure import ThresholdStats
from batchmill.spool import SinkStats, SpoolStats
from batchmill.store import OutboxDepth
from batchmill.telemetry import Distribution, RegistryStats
from batchmill.workers import CommitStats, EmbeddedStats
from tests.docs.kit import DOCS

PAGE = DOCS / "counters.md"
BEGIN = "<!-- The tables from here on are made by `python -m tests.docs.stats`. -->\n"

STATS: dict[type, str] = {
    BatchQueueStats: "`BatchQueue.stats()`",
    PartitionStats: "`BatchQueueStats.partitions`",
    ThreadLoad: "`BatchQueueStats.threads`",
    BatchQueueManagerStats: "`BatchQueueManager.stats()`",
    ThresholdStats: "`QueueThresholdManager.stats()`, `BatcherStats.thresholds`",
    BatcherStats: "`MicroBatcher.stats()`",
    FlowStats: "`FlowDispatcher.stats()`",
    WorkerStats: "`FlowStats.workers`",
    LatencyStats: "`FlowStats.handler_latency`, `FlowStats.wait`",
    SinkStats: "`stats()` of any span sink, the spool's and Kafka's in common",
    SpoolStats: "`Spool.stats()`",
    KafkaStats: "`KafkaSink.stats()`",
    ClientStats: "`Client.stats()`",
    EmbeddedStats: "`Embedded.stats()`",
    CommitStats: "`Committer.counts`",
    ExporterStats: "`Exporter.stats()`",
    OutboxDepth: "`ExporterStats.waiting`",
    RemoteWriteStats: "`RemoteWriter.stats()`",
    AlertStats: "`AlertEngine.stats()`",
    RegistryStats: "`batchmill.telemetry.default_registry.stats()`",
    Distribution: "`BatchQueueStats.batch_sizes` and others like it",
}
UNSAID = {
    "ExporterStats.name": "The exporter's name.",
    "RemoteWriteStats.sent": "Samples that the receiver has accepted.",
    "RemoteWriteStats.retries": "Requests that were retried.",
    "RemoteWriteStats.bytes_sent": "Compressed bytes of accepted requests.",
    "OutboxDepth.files": "Waiting files.",
    "OutboxDepth.rows": "Rows in them: a row is a minute of an entity with all its values.",
    "OutboxDepth.bytes": "Their size.",
}
"""Descriptions of fields whose names explain themselves in the code."""


def made() -> str:
    """The tables."""
    return "\n".join(line for stat in STATS for line in _lines(stat)) + "\n"


def _lines(stats: type) -> Iterator[str]:
    yield from ("", f"### {stats.__name__}", "", f"{STATS[stats]}.", "")
    yield from ("| field | what it is |", "|---|---|")
    for name, text in meanings(stats).items():
        yield f"| `{name}` | {text} |"


def meanings(stats: type) -> dict[str, str]:
    """What its docstrings say of each public field and property."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(stats))).body
    assert isinstance(body, ast.ClassDef)
    texts: dict[str, str] = {}
    for base in stats.__bases__:
        if dataclasses.is_dataclass(base):
            texts |= meanings(base)
    for node, following in zip(body.body, [*body.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            texts[node.target.id] = _said(following)
        elif isinstance(node, ast.FunctionDef) and _is_property(node):
            texts[node.name] = _plain(ast.get_docstring(node) or "")
    shown = {name: text for name, text in texts.items() if not name.startswith("_")}
    return {name: text or UNSAID[f"{stats.__name__}.{name}"] for name, text in shown.items()}


def _said(node: ast.stmt | None) -> str:
    value = node.value if isinstance(node, ast.Expr) else None
    is_text = isinstance(value, ast.Constant) and isinstance(value.value, str)
    return _plain(str(value.value)) if is_text and isinstance(value, ast.Constant) else ""


def _is_property(node: ast.FunctionDef) -> bool:
    return any(
        isinstance(decorator, ast.Name) and decorator.id == "property"
        for decorator in node.decorator_list
    )


def _plain(text: str) -> str:
    return " ".join(text.split()).replace("``", "`").replace("|", "\\|")


def main() -> None:
    """Write the tables."""
    kept, _, _ = PAGE.read_text("utf-8").partition(BEGIN)
    PAGE.write_text(kept + BEGIN + made(), "utf-8")


if __name__ == "__main__":
    main()
