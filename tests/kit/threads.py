"""Threads in tests: wait for a condition, hold a thread at a gate, run a call on its own thread.

A test never sleeps to let another thread get somewhere: it waits until that thread is there.
``WAIT_S`` and ``PATIENCE_S`` only say how long it waits before it fails. They are long, so that no
test fails because the machine is busy.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, ClassVar, Self, TypeVar

T = TypeVar("T")

WAIT_S = 60.0
"""How long anything in this process may take before its test fails."""

PATIENCE_S = 150.0
"""How long another process, a server or Spark may take for anything before its test fails."""

SOAK = max(1, int(os.environ.get("BATCHMILL_SOAK", "1")))
"""Multiplies the rounds of the stress tests."""


def until(
    condition: Callable[[], T],
    what: str | Callable[[], str] = "the condition",
    timeout_s: float = PATIENCE_S,
) -> T:
    """Wait until ``condition()`` is true and return its value; fail after ``timeout_s``.

    For states that signal nobody: a file, a counter, another process. It looks often at first and
    every 20 ms later on. ``what`` is for the error: the state that did not come, or a report.
    """
    deadline = time.monotonic() + timeout_s
    pause_s = 0.0002
    while not (value := condition()):
        if time.monotonic() > deadline:
            state = what() if callable(what) else what
            raise AssertionError(f"not within {timeout_s:g} s: {state}")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.02)
    return value


class Gate:
    """Holds every thread that comes to it, until it is opened or lets some pass.

    Have the code under test call :meth:`wait`, or use the gate as a handler: it keeps each batch
    in ``batches`` and then waits. ``wait_entered()`` returns when a thread is at the gate. As a
    context manager it opens at the end of the block, so that a failing test does not hang.
    """

    _all: ClassVar[weakref.WeakSet[Gate]] = weakref.WeakSet()

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []
        self._entered = threading.Semaphore(0)
        self._passes = threading.Semaphore(0)
        self._opened = threading.Event()
        Gate._all.add(self)

    def wait(self) -> None:
        """Be held here: called by the thread that the test wants to stop."""
        self._entered.release()
        if self._opened.is_set():
            return
        if not self._passes.acquire(timeout=2 * WAIT_S):
            raise TimeoutError("the test never opened its gate")
        if self._opened.is_set():
            self._passes.release()  # for the next one: an open gate stays open

    def consume(self, batch: list[Any]) -> None:
        """Keep the batch, then wait."""
        self.batches.append(batch)
        self.wait()

    __call__ = consume

    @property
    def items(self) -> list[Any]:
        """All items of all batches, in order."""
        return [item for batch in self.batches for item in batch]

    def wait_entered(self, calls: int = 1) -> None:
        """Return when ``calls`` threads more than before have come to the gate."""
        for _ in range(calls):
            assert self._entered.acquire(timeout=WAIT_S), "no thread came to the gate"

    def let_pass(self, calls: int = 1) -> None:
        """Let that many threads pass; the gate stays closed for the others."""
        self._passes.release(calls)

    def open(self) -> None:
        """Let everybody pass, now and later."""
        self._opened.set()
        self._passes.release()

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    @classmethod
    def open_all(cls) -> None:
        """Open every gate there is: for the clean-up of a test that failed."""
        for gate in list(cls._all):
            gate.open()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.open()


class Spawned(Future[T]):
    """The result of a call that runs on a thread of its own; see :func:`spawn`."""

    def __init__(self) -> None:
        super().__init__()
        self.thread: threading.Thread

    def result(self, timeout: float | None = WAIT_S) -> T:
        """What the call returned, or raise what it raised; its thread has ended then."""
        try:
            return super().result(timeout)
        finally:
            if self.done():
                self.thread.join(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.thread.join(WAIT_S)


def spawn(call: Callable[..., T], *args: Any, **named: Any) -> Spawned[T]:
    """Run ``call`` on a thread of its own.

    ``.result()`` waits for what came of it. Used in a ``with`` statement, the thread has ended
    when the block has.
    """
    future: Spawned[T] = Spawned()

    def run() -> None:
        try:
            future.set_result(call(*args, **named))
        except BaseException as error:  # noqa: BLE001 - handed to whoever asks for the result
            future.set_exception(error)

    future.thread = threading.Thread(target=run, daemon=True, name=f"spawned-{call!r}")
    future.thread.start()
    return future


_lasting: Counter[str] = Counter()


@contextlib.contextmanager
def lasting_threads(prefix: str) -> Iterator[None]:
    """Threads of this name may outlive a test: they are those of a server for a whole module.

    When the block ends, so must they have.
    """
    _lasting[prefix] += 1
    try:
        yield
    finally:
        _lasting[prefix] -= 1
    if not _lasting[prefix]:
        until(
            lambda: not any(thread.name.startswith(prefix) for thread in threading.enumerate()),
            f"all threads {prefix}* have ended",
        )


def may_last(thread: threading.Thread) -> bool:
    """Whether the thread may outlive a test; see :func:`lasting_threads`."""
    return any(thread.name.startswith(prefix) for prefix in +_lasting)
