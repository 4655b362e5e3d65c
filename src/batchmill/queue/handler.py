"""What a user gives the queue to call, and the queue's own record of it."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Hashable
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

from batchmill.errors import ConfigError

T = TypeVar("T")


@runtime_checkable
class HandlerConsumer(Protocol[T]):
    """Takes batches of one class (or, as a queue's ``consumer``, of everything).

    Calls to one handler never overlap within a queue, whichever threads make them, and that
    includes the optional methods below. (A direct ``consumer`` on several drain threads is the
    one exception: it runs concurrently unless the queue was made with ``serialize=True``.)

    * ``on_idle(self)``: called each time the drain thread finds nothing to do, with the queue's
      back-off between calls. The place to pass on what was merged.
    * ``on_shutdown(self)``: called once, after the last batch. Without it the handler gets one
      last ``on_idle``.
    """

    def consume(self, batch: list[T], /) -> object:
        """Handle ``batch``; an exception marks all of it failed. The list is yours to keep."""


Handler: TypeAlias = HandlerConsumer[Any] | Callable[[list[Any]], object]
ErrorHandler: TypeAlias = Callable[[list[Any], BaseException], object]


class Receiver:
    """One user handler as the queue sees it: its methods, and the lock that keeps calls apart.

    A handler registered for several classes has one receiver, so its calls never overlap and it
    hears ``on_idle`` once, not once per class.
    """

    __slots__ = (
        "__weakref__",
        "classes",
        "consume",
        "handler",
        "lock",
        "on_idle",
        "on_shutdown",
    )

    def __init__(self, handler: Handler, *, exclusive: bool) -> None:
        self.handler = handler
        consume = getattr(handler, "consume", None)
        if not callable(consume):
            consume = handler
        if not callable(consume):
            raise ConfigError(
                "handler", handler, "a callable, or an object with a consume(batch) method"
            )
        self.consume: Callable[[list[Any]], object] = consume
        self.on_idle: Callable[[], object] | None = _optional(handler, "on_idle")
        self.on_shutdown = _optional(handler, "on_shutdown") or self.on_idle
        self.lock: threading.Lock | None = threading.Lock() if exclusive else None
        self.classes: set[type] = set()

    def renew_lock(self) -> None:
        """Replace the lock in a forked child, where its holder may not exist."""
        if self.lock is not None:
            self.lock = threading.Lock()


def identity_of(handler: Handler) -> Hashable:
    """What makes two registrations the same handler: equality for bound methods, else identity.

    ``obj.method`` is a new object each time it is read, but it is the same handler.
    """
    owner = getattr(handler, "__self__", None)
    if owner is None or isinstance(owner, types.ModuleType):
        return id(handler)
    # A method of a built-in, such as a list's append, has a name and no function.
    function = getattr(handler, "__func__", None)
    return (id(owner), id(function) if function is not None else getattr(handler, "__name__", ""))


def _optional(handler: object, name: str) -> Callable[[], object] | None:
    method = getattr(handler, name, None)
    return method if callable(method) else None
