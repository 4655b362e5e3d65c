"""Checks of the functions that applications hand in: they must do their work when they are called.

A call of a coroutine function only makes a coroutine, and a call of a generator function a
generator. Where nothing runs these, the items would count as handled and be lost. Such functions
are refused where they are registered. A function that cannot be recognized (a lambda that calls
one, a decorator) is recognized by what it returns, and the call counts as failed.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Generator
from types import CoroutineType
from typing import Any

from batchmill.errors import ConfigError, UnawaitedError

_ADVICE = (
    "run your coroutines in a plain function, with asyncio.run(…), or on your own loop with "
    "asyncio.run_coroutine_threadsafe(…, loop).result()"
)
_KINDS = (
    (inspect.iscoroutinefunction, f"a plain function, not a coroutine function: {_ADVICE}"),
    (inspect.isasyncgenfunction, f"a plain function, not an async generator: {_ADVICE}"),
    (inspect.isgeneratorfunction, "a plain function: this one has a yield, so it would never run"),
)


def check_plain(field: str, function: object) -> None:
    """Raise ConfigError for a function whose call does not do its work.

    Looks through ``functools.partial``, bound methods and objects with ``__call__``.
    """
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    for candidate in (inner, inspect.getattr_static(type(inner), "__call__", None)):
        for is_kind, allowed in _KINDS:
            if is_kind(candidate):
                raise ConfigError(field, function, allowed)


def check_done(function: object, answer: object) -> None:
    """Raise UnawaitedError if ``function`` returned work that is still to do, not a result."""
    if answer is None:
        return
    if isinstance(answer, (CoroutineType, Generator)):
        answer.close()  # else Python warns that it was never awaited, and says no more
    elif not isinstance(answer, AsyncGenerator) and not inspect.isawaitable(answer):
        return
    raise UnawaitedError(_name_of(function), type(answer).__name__)


def _name_of(function: Any) -> str:
    return getattr(function, "__qualname__", None) or repr(function)
