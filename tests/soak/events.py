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

from tests.soak.load import Load
from tests.soak.schedule import Disturbance
from tests.soak.stage import Stage
from tests.soak.strangers import Strangers

DAY_S = 86_400.0


class Director:
    """Begins and ends disturbances, and keeps a log of them."""

    def __init__(self, stage: Stage, loads: Mapping[str, Load], say: Callable[[str], None]) -> None:
        self._stage, self._loads, self._say = stage, loads, say
        self._running: dict[Disturbance, AbstractContextManager[object]] = {}
        self.log: list[tuple[float, str]] = []
        """When what has happened, in seconds since the start."""
        self.missed: list[str] = []
        """What did not happen, as its target did not run at that moment."""

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
                if what == "end" or at_s >= seconds:
                    self._finish(event)
                elif self._begin(event, time.monotonic() - start) and event.lasts_s:
                    heapq.heappush(moments, (at_s + event.lasts_s, next(order), "end", event))
            end.wait(max(0.0, start + seconds - time.monotonic()))
        finally:
            for event in list(self._running):
                self._finish(event)

    def _begin(self, event: Disturbance, at_s: float) -> bool:
        disturb = self._disturb(event)
        if disturb is None:
            self.missed.append(str(event))
            self._say(f"{at_s:6.0f} s  {event}: not there")
            return False
        disturb.__enter__()
        self.log.append((at_s, str(event)))
        self._say(f"{at_s:6.0f} s  {event}")
        if event.lasts_s:
            self._running[event] = disturb
        return True

    def _finish(self, event: Disturbance) -> None:
        disturb = self._running.pop(event, None)
        if disturb is not None:
            disturb.__exit__(None, None, None)

    def _disturb(self, event: Disturbance) -> AbstractContextManager[object] | None:
        """What makes an event happen; None: it cannot happen now."""
        stage = self._stage
        if event.kind in ("kill", "stop"):
            pid = stage.pids().get(event.target)
            if pid is None:
                return None
            return _kill(pid) if event.kind == "kill" else _stopped(pid)
        if event.kind == "strangers":
            return Strangers(event.target, stage.ports)
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
        with contextlib.ExitStack() as stack:
            for load in self._loads.values():
                stack.enter_context(_set(load, "machine_skew_s", seconds))
            self._stage.move_clock(seconds)
            try:
                yield
            finally:
                self._stage.move_clock(0)


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
