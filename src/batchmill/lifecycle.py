"""What everything with threads does when the process forks, when it ends, and when it is closed.

* Fork: threads do not survive it. In the child, every tracked object starts anew, empty, with
  threads and locks of its own; what the parent had waiting is the parent's.
* Exit: whatever was never closed is closed, each within its own timeout, while its threads still
  run; what passes on to others (``downstream``) before them. A child of ``multiprocessing`` that
  was forked ends without Python's exit hooks, so there multiprocessing's own hook does the same.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, Self, TypeVar


class Tracked(Protocol):
    """Something to take care of at fork and at exit.

    It may have an attribute ``downstream``: the tracked things that it passes on to, which must
    still be open while it drains. What consists of other tracked things, which close themselves at
    exit, may inherit from it.
    """

    fork_order: int
    """In a forked child, lower ones start anew first."""

    def begin_close(self) -> None:
        """Take nothing more and start draining; waits for nobody."""
        return

    def await_close(self) -> None:
        """Wait for the draining, as long as the object's settings allow."""
        return

    def after_fork_in_child(self) -> None:
        """Start anew: threads are gone, locks may be held, what was queued is the parent's."""
        ...


class Pausing(Tracked, Protocol):
    """Something that must not be in the middle of its work while the process forks.

    In the child it starts anew before all others.
    """

    def before_fork(self) -> None:
        """Pause, if that is possible within a few seconds."""
        ...

    def after_fork_in_parent(self) -> None:
        """Go on."""
        ...


class Closing(ABC):
    """Is closed at the end of a ``with`` block."""

    @abstractmethod
    def close(self) -> object:
        """Let go of everything."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


T = TypeVar("T")

_lock = threading.Lock()
_tracked: weakref.WeakSet[Any] = weakref.WeakSet()
_kept: set[Any] = set()
_pausing: weakref.WeakSet[Any] = weakref.WeakSet()
_hooked_multiprocessing = False
_hooked_child = 0


def track(thing: Tracked) -> None:
    """Take care of ``thing`` for as long as it lives."""
    with _lock:
        _tracked.add(thing)
    _hook_multiprocessing_child()


def pause_at_fork(thing: Pausing) -> None:
    """Have ``thing`` pause at every fork, for as long as it lives."""
    with _lock:
        _pausing.add(thing)


def keep(thing: Tracked) -> None:
    """Keep something alive until it is closed, also if it was garbage and its finaliser revived it.

    The garbage collector clears weak references before it calls finalisers, so such a thing is not
    tracked any more. Called by finalisers: it takes no lock.
    """
    _kept.add(thing)


def release(thing: Tracked) -> None:
    """What was kept has closed, and may go."""
    _kept.discard(thing)


def leave_forked_child() -> None:
    """End a process that was forked inside a handler and has now returned from it.

    The thread that forked is all there is of the parent's threads, and it has nothing to return
    to: what the child did with its own queues is finished, and the process ends.
    """
    close_all()
    os._exit(0)


def close_all() -> None:
    """Close everything that is still open: all gates first, then wait for each.

    What others pass on to comes after them, and what stands on others hands over before they close.
    """
    begun: set[Any] = set()
    try:
        while things := _alive() - begun:  # handing over may make new ones
            for group in closing_groups(things):
                for thing in sorted(group, key=lambda thing: -thing.fork_order):
                    thing.begin_close()
                for thing in group:
                    thing.await_close()
            begun |= things
    except KeyboardInterrupt:  # the user has waited long enough; a traceback would tell nothing
        pass


def closing_groups(things: Iterable[T]) -> Iterator[list[T]]:
    """``things`` in groups to close one after the other: upstream first, by ``downstream``."""
    left = list(things)
    while left:
        fed = {thing for upstream in left for thing in getattr(upstream, "downstream", ())}
        group = [thing for thing in left if thing not in fed] or left  # in a cycle: all at once
        yield group
        closed = set(group)
        left = [thing for thing in left if thing not in closed]


def _alive() -> set[Any]:
    with _lock:
        return {*_tracked, *_kept}


def _hook_multiprocessing_child() -> None:
    """Do the same in a child of multiprocessing that has imported batchmill only now."""
    global _hooked_child
    process: Any = sys.modules.get("multiprocessing.process")
    util: Any = sys.modules.get("multiprocessing.util")
    if util is None or _hooked_child == os.getpid() or process.parent_process() is None:
        return
    _hooked_child = os.getpid()
    util.Finalize(None, close_all, exitpriority=0)


def _before_fork() -> None:
    _hook_multiprocessing()
    for thing in list(_pausing):
        thing.before_fork()
    _lock.acquire()


def _after_fork_in_parent() -> None:
    _lock.release()
    for thing in list(_pausing):
        thing.after_fork_in_parent()


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()
    # What has paused first: it holds locks, which threads that start here would wait for.
    paused = set(_pausing)
    things = sorted({*_tracked, *_kept}, key=lambda thing: (thing not in paused, thing.fork_order))
    for thing in things:
        thing.after_fork_in_child()


def _hook_multiprocessing() -> None:
    """Have a forked multiprocessing child close everything before it leaves by os._exit()."""
    global _hooked_multiprocessing
    util: Any = sys.modules.get("multiprocessing.util")
    if util is None or _hooked_multiprocessing:
        return
    _hooked_multiprocessing = True
    util.register_after_fork(close_all, lambda _: util.Finalize(None, close_all, exitpriority=0))


atexit.register(close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=_after_fork_in_parent,
        after_in_child=_after_fork_in_child,
    )
