"""Whose backend the running code is in: what would wait for itself there is refused.

A context variable rather than a thread's own: it follows an async backend onto its event loop, and
from there through ``asyncio.to_thread`` into other threads.
"""

from __future__ import annotations

from contextvars import ContextVar


class Visit:
    """A stay inside a backend; whatever inherited it (a background task) sees when it is over."""

    __slots__ = ("owner",)

    def __init__(self, owner: object) -> None:
        self.owner: object = owner


_visit: ContextVar[Visit | None] = ContextVar("batchmill_batcher_visit", default=None)


def enter(owner: object) -> Visit:
    """From now on, in this context, code runs inside the backend of ``owner``."""
    visit = Visit(owner)
    _visit.set(visit)
    return visit


def current() -> object:
    """The owner of the backend the caller is in, or None."""
    visit = _visit.get()
    return visit.owner if visit is not None else None
