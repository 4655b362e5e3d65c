"""Strangers who come back, and whether honest clients are answered beside them, soon enough."""

from __future__ import annotations

import contextlib
import itertools
import math
import socket
import threading
import time
from collections.abc import Callable
from typing import Self

from tests.kit.threads import until

HONEST = 40
"""Requests of honest clients in each attack, each on a connection of its own."""
GOAL = 0.95
SOON_S, SLOWER = 10.0, 5
"""An answer counts within so many seconds or, where the machine is that busy, within so many times
what the slowest answer of a server took that nobody attacks."""

Ask = Callable[[int], bool]
"""Makes the request of this number: whether it was answered with success."""


def check_answered(
    ask: Ask, calm: Ask, count: int = HONEST, clock: Callable[[], float] = time.monotonic
) -> None:
    """Honest clients are answered, and soon: 95 % of ``count`` requests.

    ``calm`` makes the same requests to a server that nobody attacks, in turn with the others: a
    machine that is busy makes both slow, an attack only one.
    """

    def took(request: Ask, number: int) -> float:
        """Seconds; without end if it was not answered."""
        began = clock()
        with contextlib.suppress(OSError, AssertionError, KeyError):
            if request(number):
                return clock() - began
        return math.inf

    times, calm_times = [], []
    for number in range(1, count + 1):
        times.append(took(ask, number))
        calm_times.append(took(calm, number))
    slowest = max(calm_times)
    assert slowest < math.inf, "the server that nobody attacks does not answer"
    in_time = [seconds for seconds in times if seconds <= max(SOON_S, SLOWER * slowest)]
    assert len(in_time) >= GOAL * count, (sorted(times), slowest)


class Returning:
    """Strangers who keep many connections, and open those anew that are closed.

    They begin with ``head``, and send ``more`` now and then: nothing at all, or headers that have
    no end.
    """

    def __init__(
        self, place: tuple[str, int], count: int, head: bytes = b"", more: bytes = b""
    ) -> None:
        self.reconnects = 0
        self._place = place
        self._head, self._more = head, more
        self._links: list[socket.socket | None] = [None] * count
        self._filled, self._end = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        until(self._filled.is_set, "all of them have come")
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        for link in self._links:
            if link is not None:
                link.close()

    def _run(self) -> None:
        for number in itertools.cycle(range(len(self._links))):
            if self._end.is_set():
                return
            link = self._links[number]
            try:
                if link is None:
                    link = self._open()
                    self._links[number] = link
                link.send(self._more)
                if not link.recv(1000):
                    raise ConnectionResetError
            except BlockingIOError:
                pass
            except OSError:
                if link is not None:
                    link.close()
                self._links[number] = None
                self.reconnects += 1
            if number == len(self._links) - 1:
                self._filled.set()
            self._end.wait(0.0005)

    def _open(self) -> socket.socket:
        link = socket.create_connection(self._place)
        try:
            link.sendall(self._head)
            link.setblocking(False)
        except OSError:
            link.close()
            raise
        return link
