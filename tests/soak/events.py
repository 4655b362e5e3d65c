"""Makes the disturbances of a schedule happen to a stage, each at its moment."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager

from batchmill.run import spool_backlog
from tests.soak.balance import ClockMove
from tests.soak.load import Load
from tests.soak.schedule import Disturbance
from tests.soak.stage import Stage
from tests.soak.strangers import Strangers
from tests.soak.verdict import Happened

DAY_S = 86_400.0
AGAIN_S = 5.0
PATIENCE_S = 300.0
"""How long a disturbance waits for its target, such as a pipeline that starts."""


class Director:
    """Begins and ends disturbances, and keeps a log of them."""

    def __init__(self, stage: Stage, loads: Mapping[str, Load], say: Callable[[str], None]) -> None:
        self._stage, self._loads, self._say = stage, loads, say
        self._running: dict[Disturbance, tuple[AbstractContextManager[object], float]] = {}
        self.happened: list[Happened] = []
        """Times are of the monotonic clock."""
        self.log: list[tuple[float, str]] = []
        """When what has happened, in seconds since the start."""
        self.missed: list[str] = []
        """What did not happen, as its target did not run."""

    def play(self, plan: list[Disturbance], seconds: float, end: threading.Event) -> None:
        """Have everything happen in time; returns after ``seconds``, or at ``end``."""
        start = time.monotonic()
        order = itertools.count()
        moments = [(event.at_s, next(order), "begin", event) for event in plan]
        heapq.heapify(moments)
        try:
            while moments and not end.is_set():
                at_s, _, what, event = heapq.heappop(moments)
                if end.wait(max(0.0, start + min(at_s, seconds) - time.monotonic())):
                    return
                if what == "end":
                    self._finish(event)
                elif at_s >= seconds:
                    self._miss(event, time.monotonic() - start)
                elif self._begin(event, time.monotonic() - start):
                    if event.lasts_s:
                        heapq.heappush(moments, (at_s + event.lasts_s, next(order), "end", event))
                elif at_s < event.at_s + PATIENCE_S:
                    heapq.heappush(moments, (at_s + AGAIN_S, next(order), "begin", event))
                else:
                    self._miss(event, time.monotonic() - start)
            end.wait(max(0.0, start + seconds - time.monotonic()))
        finally:
            for event in list(self._running):
                self._finish(event)

    def _begin(self, event: Disturbance, at_s: float) -> bool:
        disturb = self._disturb(event)
        if disturb is None:
            return False
        began_s = time.monotonic()
        disturb.__enter__()
        self.log.append((at_s, str(event)))
        self._say(f"{at_s:6.0f} s  {event}")
        self._running[event] = disturb, began_s
        if not event.lasts_s:
            self._finish(event)
        return True

    def _miss(self, event: Disturbance, at_s: float) -> None:
        self.missed.append(str(event))
        self._say(f"{at_s:6.0f} s  {event}: not there")

    def _finish(self, event: Disturbance) -> None:
        if event in self._running:
            disturb, began_s = self._running.pop(event)
            disturb.__exit__(None, None, None)
            self.happened.append(Happened(event, began_s, time.monotonic()))

    def _disturb(self, event: Disturbance) -> AbstractContextManager[object] | None:
        """What makes an event happen; None: it cannot happen now."""
        stage = self._stage
        if event.kind in ("kill", "stop"):
            pid = stage.pids().get(event.target)
            if pid is None:
                return None
            return _kill(pid) if event.kind == "kill" else _stopped(pid)
        if event.kind == "strangers":
            attack, _, listener = event.target.rpartition(" at ")
            return Strangers(attack, stage.listeners[listener])
        if event.kind == "peer":
            return _peer(stage, event.target)
        if event.kind == "sender clock":
            days = 40 if "ahead" in event.target else -40
            return _set(self._loads["main"], "skew_days", days)
        if event.kind == "postgres" and stage.postgres is not None:
            return _postgres_down(stage, "fast" if event.target == "restart" else "immediate")
        if event.kind == "disk" and stage.disk:
            return _full_disk(stage)
        if event.kind == "machine clock" and stage.clock is not None:
            return self._moved_clock(40 * DAY_S * (1 if "ahead" in event.target else -1))
        return None

    @contextlib.contextmanager
    def _moved_clock(self, seconds: float) -> Iterator[None]:
        unread_since_s, began_s = {}, time.time()
        with contextlib.ExitStack() as stack:
            for road, load in self._loads.items():
                stack.enter_context(_set(load, "machine_skew_s", seconds))
                spool = self._stage.homes[road].spool
                unread_since_s[road] = began_s - spool_backlog(spool).oldest_s
            self._stage.move_clock(seconds)
            try:
                yield
            finally:
                self._stage.move_clock(0)
        for road, load in self._loads.items():
            load.moves.append(
                ClockMove(
                    began_s=began_s,
                    ended_s=time.time(),
                    unread_since_s=unread_since_s[road],
                    is_ahead=seconds > 0,
                )
            )


@contextlib.contextmanager
def _kill(pid: int) -> Iterator[None]:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    yield


@contextlib.contextmanager
def _stopped(pid: int) -> Iterator[None]:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def _peer(stage: Stage, mode: str) -> Iterator[None]:
    if mode == "dead":
        stage.peer.close()
    stage.peer.mode = mode
    try:
        yield
    finally:
        stage.peer.mode = ""
        if mode == "dead":
            stage.peer.open()


@contextlib.contextmanager
def _postgres_down(stage: Stage, mode: str) -> Iterator[None]:
    assert stage.postgres is not None
    stage.postgres.stop(mode)
    try:
        yield
    finally:
        stage.postgres.start()


@contextlib.contextmanager
def _full_disk(stage: Stage) -> Iterator[None]:
    stage.fill_disk()
    try:
        yield
    finally:
        stage.free_disk()


@contextlib.contextmanager
def _set(load: Load, name: str, value: float) -> Iterator[None]:
    setattr(load, name, value)
    try:
        yield
    finally:
        setattr(load, name, 0)
