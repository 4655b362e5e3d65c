"""Where the workers of a batcher wait for something to do.

Guarantees
    * A worker that waits with nothing to do keeps neither the engine nor the backend alive: a
      batcher that nobody references ends, even if its backend is a method of its owner.
    * One worker at a time forms a batch; the others stand in line for their turn.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from typing import TYPE_CHECKING, NamedTuple

from batchmill.batcher import inside
from batchmill.batcher.clock import Clock
from batchmill.batcher.pending import Entry
from batchmill.waiters import ThreadWaiter

if TYPE_CHECKING:
    from batchmill.batcher.engine import Engine

log = logging.getLogger("batchmill.batcher")


class Work(NamedTuple):
    """What a worker finds when it looks."""

    batch_id: int = 0
    batch: list[Entry] | None = None
    """To be sent now."""
    leave: bool = False
    """There will be no more."""
    until: float | None = None
    """When to look again at the latest; None: when called."""


class Desk:
    """The line of workers in front of an engine; also the mark of code inside its backend."""

    __slots__ = (
        "__weakref__",
        "_clock",
        "_engine",
        "_turn",
        "bell",
        "free",
        "live",
        "revived",
        "workers",
    )

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine = weakref.ref(engine)
        self._clock = clock
        self._turn = threading.Lock()
        self.bell = ThreadWaiter()
        """Rung for the worker whose turn it is."""
        self.revived: Engine | None = None
        """An engine that nobody references any more, and that is to close."""

        self.workers: list[threading.Thread] = []
        """All that were ever started. This and the counts are the engine's, under its lock."""
        self.free = 0
        """Workers that wait for a batch."""
        self.live = 0
        """Workers that have not left."""

    def want_worker(self, limit: int, name: str) -> None:
        """Start a worker if none is free and there are fewer than ``limit``; the lock is held.

        Raises RuntimeError where no thread is to be had and there is no worker at all.
        """
        if self.free or len(self.workers) >= limit:
            return
        thread = threading.Thread(target=self.run, name=f"{name}-{len(self.workers)}", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            if not self.workers:
                raise
            log.exception("%s: no thread to be had, going on with fewer workers", name)
            return
        self.workers.append(thread)
        self.live += 1
        self.free += 1  # it counts from now, so that no second one is started for it

    @property
    def engine(self) -> Engine | None:
        """The engine, while there is one."""
        return self._engine() or self.revived

    def expire(self, reference: weakref.ref[Entry]) -> None:
        """The time of an entry is over."""
        engine, entry = self.engine, reference()
        if engine is not None and entry is not None:
            engine.expire(entry)

    def run(self) -> None:
        """The life of a worker."""
        inside.enter(self)
        process = os.getpid()
        while self._serve(process):
            pass

    def _serve(self, process: int) -> bool:
        engine, work = self._await_work()
        if engine is None:
            return False
        if work.batch is None:
            engine.leave()
            return False
        try:
            engine.send(work.batch_id, work.batch, process)
        except BaseException as error:  # a fault of ours must cost neither items nor a worker
            log.exception("batchmill batcher %s: a worker failed", engine.name)
            engine.fail(work.batch_id, error)
        return True

    def _await_work(self) -> tuple[Engine | None, Work]:
        with self._turn:
            while True:
                engine = self.engine
                if engine is None:
                    return None, Work()
                work = engine.look()
                if work.leave or work.batch is not None:
                    return engine, work
                if work.until is None:
                    del engine  # nothing waits: be no reason for it to live
                self._clock.wait(self.bell, work.until)
