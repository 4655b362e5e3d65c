"""Ctrl-C and SIGTERM: counted for a loop that polls, or passed to a server on an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
from collections.abc import Callable
from typing import Any, Protocol, Self

POLL_S = 0.1


class Signals:
    """While entered, counts SIGINT, SIGTERM and SIGHUP; each ends a :meth:`wait` early."""

    WATCHED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.count = 0
        self._before: dict[int, Any] = {}
        self._pipe = (-1, -1)

    def wait(self, seconds: float = POLL_S) -> None:
        """Sleep, until a signal comes at most."""
        readable, _, _ = select.select([self._pipe[0]], [], [], seconds)
        if readable:
            os.read(self._pipe[0], 64)

    def _note(self, number: int, frame: object) -> None:
        self.count += 1
        with contextlib.suppress(BlockingIOError):  # full: wait() returns anyway
            os.write(self._pipe[1], b"!")

    def __enter__(self) -> Self:
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        for number in self.WATCHED:
            if signal.getsignal(number) is signal.SIG_IGN and number != signal.SIGTERM:
                continue  # nohup, or a shell's background job: not to be stopped by these
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        for handle in self._pipe:
            os.close(handle)


class Server(Protocol):
    """A server that runs on an event loop until it is stopped."""

    def stop(self) -> None:
        """Ask it to end."""

    async def serve(self, ready: Callable[[], None] | None = None) -> None:
        """Serve until stopped; ``ready`` is called once it listens."""


async def serve_until_signal(
    server: Server, ready: Callable[[], None], last_words: bytes = b""
) -> None:
    """Serve until Ctrl-C or SIGTERM; a second Ctrl-C writes ``last_words`` and exits with 130."""
    loop = asyncio.get_running_loop()
    stopping = False

    def stop(number: int) -> None:
        nonlocal stopping
        if stopping and number == signal.SIGINT:
            os.write(2, last_words)
            os._exit(130)
        stopping = True
        server.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    await server.serve(ready)
