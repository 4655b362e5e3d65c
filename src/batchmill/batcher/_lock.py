"""Taking a lock that is held for a moment only, by many threads at once."""

from __future__ import annotations

import threading
import time

_TRIES = 20


def seize(lock: threading.Lock) -> None:
    """Acquire ``lock``, letting other threads run rather than queueing up behind it at first.

    Threads that wait for a lock under the GIL form a convoy: each release hands the lock to a
    thread that does not have the GIL yet, and everybody waits for that. Giving up one's turn and
    trying again is several times as quick where the lock is held for a microsecond.
    """
    if lock.acquire(False):
        return
    for _ in range(_TRIES):
        time.sleep(0)
        if lock.acquire(False):
            return
    lock.acquire()
