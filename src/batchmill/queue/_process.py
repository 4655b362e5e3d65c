"""What the queues of a process do when it forks and when it ends.

* Fork: threads do not survive it. In the child every live queue starts anew, empty, with threads
  and locks of its own; what the parent had queued is the parent's.
* Exit: every queue that was never shut down drains, each within its ``shutdown_timeout_ms``, while
  its threads still run. A child of ``multiprocessing`` that was forked ends without the exit
  hooks of Python, so there multiprocessing's own hook does the same.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchmill.queue._core import QueueCore
    from batchmill.queue._manager import BatchQueueManager

_lock = threading.Lock()
_cores: weakref.WeakSet[QueueCore] = weakref.WeakSet()
_managers: weakref.WeakSet[BatchQueueManager] = weakref.WeakSet()
_hooked_multiprocessing = False


def track(core: QueueCore) -> None:
    """Take care of a queue at fork and at exit, for as long as it lives."""
    with _lock:
        _cores.add(core)


def track_manager(manager: BatchQueueManager) -> None:
    """Renew a manager's lock in a forked child."""
    with _lock:
        _managers.add(manager)


def drain_all() -> None:
    """Close every live queue, then wait for each as long as it was given."""
    with _lock:
        cores = list(_cores)
    for core in cores:
        core.begin_close()
    for core in cores:
        core.done.wait(max(0.0, core.deadline - time.monotonic()))


def _before_fork() -> None:
    _hook_multiprocessing()
    _lock.acquire()


def _after_fork_in_parent() -> None:
    _lock.release()


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()
    cores = list(_cores)
    for scheduler in {core.scheduler for core in cores}:
        scheduler.after_fork_in_child()
    for core in cores:
        core.after_fork_in_child()
    for manager in list(_managers):
        manager.after_fork_in_child()


def _hook_multiprocessing() -> None:
    """Have a forked multiprocessing child drain its queues before it leaves by os._exit()."""
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
