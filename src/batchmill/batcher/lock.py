"""Being courteous about a lock that many threads take, each for a moment."""

from __future__ import annotations

import threading
import time

_COURTESIES = 20


def give_way(lock: threading.Lock) -> None:
    """Let the thread that has ``lock`` finish, before queueing up for it.

    Threads that wait for a lock under the GIL form a convoy: each release hands the lock to a
    thread that does not have the GIL yet, and everybody waits for that. Giving up one's turn first
    avoids the queue. It is a courtesy, not a lock: what follows takes the lock as ever, so that
    Ctrl-C can come at any point and leave nothing locked.
    """
    for _ in range(_COURTESIES):
        if not lock.locked():
            return
        time.sleep(0)
