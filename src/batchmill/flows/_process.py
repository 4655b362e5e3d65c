"""What the dispatchers of a process do when it forks and when it ends.

* Fork: threads do not survive it. In the child every live dispatcher starts anew, empty, with
  threads and locks of its own; what the parent had queued is the parent's.
* Exit: every dispatcher that was never closed drains, within its ``close_timeout``, while its
  threads still run. A forked child of ``multiprocessing`` ends without Python's exit hooks, so
  there multiprocessing's own hook does the same.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from batchmill.flows._waiting import ThreadWaiter

if TYPE_CHECKING:
    from batchmill.flows._core import FlowCore

log = logging.getLogger("batchmill.flows")

_lock = threading.Lock()
_cores: weakref.WeakSet[FlowCore] = weakref.WeakSet()
_hooked_multiprocessing = False


def track(core: FlowCore) -> None:
    """Take care of a dispatcher at fork and at exit, for as long as it lives."""
    with _lock:
        _cores.add(core)


def drain_all() -> None:
    """Close every live dispatcher, then wait for each as long as it was given."""
    with _lock:
        cores = list(_cores)
    for core in cores:
        core.begin_close()
    for core in cores:
        waiter = ThreadWaiter()
        if core.await_end(waiter):
            waiter.wait(core.deadline - time.monotonic())
        left = core.take_back()
        if left:
            log.warning(
                "batchmill flows %s: %d signals were not processed before the interpreter ended",
                core.name,
                len(left),
            )


def _before_fork() -> None:
    _hook_multiprocessing()
    _lock.acquire()


def _after_fork_in_parent() -> None:
    _lock.release()


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()
    for core in list(_cores):
        core.after_fork_in_child()


def _hook_multiprocessing() -> None:
    """Have a forked multiprocessing child drain before it leaves by os._exit()."""
    global _hooked_multiprocessing
    util: Any = sys.modules.get("multiprocessing.util")
    if util is None or _hooked_multiprocessing:
        return
    _hooked_multiprocessing = True
    util.register_after_fork(drain_all, lambda _: util.Finalize(None, drain_all, exitpriority=0))


atexit.register(drain_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=_after_fork_in_parent,
        after_in_child=_after_fork_in_child,
    )
