"""Peers from PyPI: janus, culsans, and the OpenTelemetry SDK's batch processor.

Each is imported when it is built. A missing one raises MissingPeer, which the benchmark reports.
"""

from __future__ import annotations

import importlib
from typing import Any

from benchmarks.queue.peers import BOUND, MAX_BATCH, Handlers, Peer, QueuePeer, dispatch


class MissingPeer(Exception):
    """A peer's package is not installed, or not in a version that this benchmark can drive."""


def _import(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPeer(f"{package} is not installed") from error


def janus_queue(handlers: Handlers, bound: int = BOUND) -> Peer:
    """The sync side of a ``janus.Queue``, with no event loop to notify: janus at its best."""
    janus = _import("janus", "janus")
    return QueuePeer(janus.Queue(bound).sync_q, handlers)


def culsans_queue(handlers: Handlers, bound: int = BOUND) -> Peer:
    """The sync side of a ``culsans.Queue``."""
    culsans = _import("culsans", "culsans")
    return QueuePeer(culsans.Queue(bound).sync_q, handlers)


class _DispatchingExporter:
    """An exporter that sends each batch to the handlers, as the consumers of other peers do."""

    def __init__(self, handlers: Handlers) -> None:
        self._handlers = handlers

    def export(self, batch: list[Any]) -> None:
        dispatch(batch, self._handlers)

    def shutdown(self) -> None:
        """Nothing to release."""


class OpenTelemetryPeer:
    """The SDK's ``BatchProcessor``, which its span and log processors put all they get into.

    It never blocks a producer: when full it drops the oldest item. So its queue is as large as the
    run, which is as good as no bound, and the check of arrivals proves that nothing was dropped.
    It has one worker thread, of its own. Items go straight to its ``emit``, past the copying that
    the log processor does first, and a full batch wakes the worker, so ``schedule_delay_millis``
    (the SDK's default, 5 s) plays no part under load.
    """

    SCHEDULE_DELAY_MS = 5_000

    def __init__(self, handlers: Handlers, capacity: int) -> None:
        export = _import("opentelemetry.sdk._logs.export", "opentelemetry-sdk")
        processor = export.BatchLogRecordProcessor(
            _DispatchingExporter(handlers),
            schedule_delay_millis=self.SCHEDULE_DELAY_MS,
            max_export_batch_size=min(MAX_BATCH, capacity),
            max_queue_size=capacity,
        )
        inner = getattr(processor, "_batch_processor", None)
        if inner is None:
            raise MissingPeer("this opentelemetry-sdk has no _batch_processor to measure")
        self._processor = inner
        self.put = inner.emit

    def finish(self) -> None:
        """Export what is left. Waits for the worker's export first: both hold the same lock."""
        self._processor.force_flush()

    def close(self) -> None:
        """Stop the worker."""
        self._processor.shutdown()
