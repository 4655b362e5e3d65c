"""Two paths into the spool: direct, and through a FlowDispatcher keyed by trace id."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from batchmill.flows import FlowDispatcher, FlowSettings
from batchmill.spool import SPAN_COLUMNS, SPAN_SOURCE, SpanBatch, Spool

DIRECT, FLOWS = "straight into the spool", "FlowDispatcher by trace id"


class Direct:
    """As ingest does it."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool

    def submit(self, batch: SpanBatch) -> Future[Any]:
        return self._spool.submit(SPAN_SOURCE, batch)

    def close(self) -> None:
        """Nothing waits here."""


class Piece:
    """The spans of one trace in one request."""

    __slots__ = ("answer", "batch", "flow_id", "left")

    def __init__(self, flow_id: str, answer: Future[Any], left: list[int]) -> None:
        self.flow_id = flow_id
        self.answer = answer
        self.left = left
        self.batch = SpanBatch()


class Flowed:
    """Each trace's spans through one worker, in order; workers put into the spool what they get.

    A request is answered when all its pieces are safe.
    """

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._lock = threading.Lock()
        config = FlowSettings(worker_count=2, idle_ttl=5.0, max_flows=None)
        self._flows: FlowDispatcher[Piece] = FlowDispatcher(self._put, config)

    def submit(self, batch: SpanBatch) -> Future[Any]:
        answer: Future[Any] = Future()
        pieces: dict[str, Piece] = {}
        left = [0]
        rows = zip(*(batch.columns[name] for name in SPAN_COLUMNS), strict=True)
        for trace, row in zip(batch.columns["trace_id"], rows, strict=True):
            piece = pieces.get(trace)
            if piece is None:
                piece = pieces[trace] = Piece(trace, answer, left)
            for column, value in zip(piece.batch.columns.values(), row, strict=True):
                column.append(value)
        left[0] = len(pieces)
        for piece in pieces.values():
            self._flows.dispatch(piece)
        return answer

    def close(self) -> None:
        self._flows.close()

    def _put(self, pieces: list[Piece]) -> None:
        stored = self._spool.submit(SPAN_SOURCE, SpanBatch.joined(piece.batch for piece in pieces))
        stored.add_done_callback(lambda done: self._settle(pieces, done))

    def _settle(self, pieces: list[Piece], stored: Future[Any]) -> None:
        error = stored.exception()
        for piece in pieces:
            with self._lock:
                piece.left[0] -= 1
                if piece.answer.done():
                    continue
                if error is not None:
                    piece.answer.set_exception(error)
                elif piece.left[0] == 0:
                    piece.answer.set_result(stored.result())


ROADS: dict[str, Callable[[Spool], Direct | Flowed]] = {DIRECT: Direct, FLOWS: Flowed}


@contextlib.contextmanager
def open_road(folder: Path, name: str) -> Iterator[Direct | Flowed]:
    """A road to a spool of its own."""
    with Spool(folder) as spool:
        road = ROADS[name](spool)
        try:
            yield road
        finally:
            road.close()
