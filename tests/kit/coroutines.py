"""Functions whose call does no work, in the shapes in which applications hand them in."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any


async def coroutine_function(*arguments: Any) -> None:
    """Never runs where nothing awaits it."""
    raise AssertionError("nothing was to run this")


async def async_generator_function(*arguments: Any) -> AsyncIterator[Any]:
    """Never runs where nothing iterates over it."""
    yield arguments


def generator_function(*arguments: Any) -> Iterator[Any]:
    """Never runs where nothing iterates over it."""
    yield arguments


class AsyncCallable:
    """An object that is called, and a bound method, both of them coroutine functions."""

    async def __call__(self, *arguments: Any) -> None:
        await coroutine_function(*arguments)

    async def method(self, *arguments: Any) -> None:
        await coroutine_function(*arguments)


def awaitable_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """A plain function that returns what ``function`` returns; nothing shows from outside."""
    return lambda *arguments: function(*arguments)


class Later:
    """An awaitable that is no coroutine."""

    def __await__(self) -> Iterator[None]:
        yield


RECOGNIZED: dict[str, Callable[..., Any]] = {
    "coroutine function": coroutine_function,
    "partial": functools.partial(coroutine_function, "an argument"),
    "partial of a partial": functools.partial(functools.partial(coroutine_function, 1), 2),
    "callable object": AsyncCallable(),
    "partial of a callable object": functools.partial(AsyncCallable(), 1),
    "bound method": AsyncCallable().method,
    "async generator": async_generator_function,
    "generator": generator_function,
}
"""What can be refused before it is called."""

UNRECOGNIZED: dict[str, Callable[..., Any]] = {
    "lambda": awaitable_of(coroutine_function),
    "lambda of an async generator": awaitable_of(async_generator_function),
    "lambda of a generator": awaitable_of(generator_function),
    "another awaitable": lambda *arguments: Later(),
}
"""What only shows by what it returns."""
