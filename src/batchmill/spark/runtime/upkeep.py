"""What is done beside the batches of a stream: read segments removed, progress told, old spans let
go of while no batch comes."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from batchmill.spark.input.inputs import Input
from batchmill.spark.l2.engine import BatchReport, StreamWriter
from batchmill.spark.runtime.checkpoint import Checkpoint
from batchmill.spark.runtime.progress import NEWEST_BATCHES, BatchTimes, Progress, look
from batchmill.store import Store
from batchmill.telemetry import ProcessStats

log = logging.getLogger("batchmill.spark")

_EVERY_S = 10.0


class Upkeep:
    """Looks after one stream that runs. Nothing that fails in here ends the stream."""

    def __init__(
        self,
        writer: StreamWriter,
        checkpoint: Checkpoint,
        store: Store,
        source: Input,
        clock: Callable[[], float],
    ) -> None:
        self._writer = writer
        self._checkpoint = checkpoint
        self._store = store
        self._clock = clock
        self._source = source
        self._told: Progress | None = None
        self._fault = ""
        self._batches: deque[BatchTimes] = deque(maxlen=NEWEST_BATCHES)
        self._process = ProcessStats()
        self._looking = threading.RLock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, span_wait_s: float) -> None:
        """Also do it now and then, in a thread, until :meth:`stop`."""
        every = min(_EVERY_S, max(0.1, span_wait_s / 4))
        self._thread = threading.Thread(
            target=self._keep_house, args=(every,), name="batchmill-housekeeper", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """End the thread, if there is one."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def progress(self) -> Progress:
        """How far the stream has come by now."""
        with self._looking:
            writer = self._writer
            found = look(writer.stream, writer.last, self._store, self._source, self._clock())
            return replace(found, batches=tuple(self._batches))

    def note(self, report: BatchReport) -> None:
        """A batch is through: tell of it, and of where its time went."""
        if report.applied:
            with self._looking:
                self._batches.append(BatchTimes.of(report, round(self._clock(), 3)))
        self.tell(committed=True)

    def tell(self, *, committed: bool = False) -> None:
        """Write the progress down; the store is asked only after a claim or a commit.

        Then it can be reached: otherwise whoever stops the stream would wait for it.
        """
        try:
            with self._looking:  # also while it writes: what is newer must not be overwritten
                if committed or self._told is None:
                    found = self.progress()
                else:
                    now = self._clock()
                    found = self._told.with_lag(self._source.unread(self._writer.last, now), now)
                self._told = found
                replace(found, queues=tuple(self._process.queues())).write(self._checkpoint.folder)
                self._fault = ""
        except Exception as error:  # noqa: BLE001 - it is for people only
            if str(error) != self._fault:  # once, not each second that a broker is away
                log.warning("the progress of %s is not told: %s", self._writer.stream, error)
            self._fault = str(error)

    def remove(self) -> None:
        """Let the source remove what is not needed any more."""
        try:
            self._source.forget(self._writer.last)
        except OSError as error:
            log.warning("read segments are not removed yet; trying again: %s", error)

    def _keep_house(self, every: float) -> None:
        due = time.monotonic() + every
        while not self._stopping.wait(min(every, self._source.look_s)):
            settled = None
            if time.monotonic() >= due:
                due = time.monotonic() + every
                try:
                    settled = self._writer.settle()
                except Exception:
                    log.exception("spans that waited too long could not be let go of; trying again")
                self.remove()
            self.tell(committed=settled is not None)
