"""The base of all errors of batchmill, and the errors of the queue."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, dataclass_transform


@dataclass_transform(eq_default=False, field_specifiers=(dataclasses.field,))
class BatchmillError(Exception):
    """Base of every error that batchmill raises on purpose.

    A subclass lists what it carries as annotated fields, in the order of its arguments, and gives
    its message as a ``template`` of them (or as its own ``__str__``), which ends with what to do.
    It also inherits the built-in error that a caller would catch anyway. The constructor, the
    attributes and pickling come from here.

    >>> class DiskFullError(BatchmillError, OSError):
    ...     path: str
    ...     free_bytes: int
    ...     template = "{path} has only {free_bytes:,} bytes left: remove old files"
    >>> str(DiskFullError("/data", 4096))
    '/data has only 4,096 bytes left: remove old files'
    """

    template: ClassVar[str] = ""
    exit_code: ClassVar[int] = 1
    """Of a command that ends with this error; 2: it was called with wrong settings."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "__annotations__" in vars(cls):
            dataclasses.dataclass(eq=False)(cls)

    def __str__(self) -> str:
        if not self.template:
            return super().__str__()
        return self.template.format_map({name: getattr(self, name) for name in self._names()})

    def __reduce__(self) -> tuple[Any, ...]:
        names = self._names(of_init=True)
        if names:
            # Not by ``args``: OSError keeps two of them at most.
            return type(self), tuple(getattr(self, name) for name in names), vars(self)
        reduced = super().__reduce__()
        assert isinstance(reduced, tuple)
        return reduced

    @classmethod
    def _names(cls, *, of_init: bool = False) -> list[str]:
        if not dataclasses.is_dataclass(cls):
            return []
        return [field.name for field in dataclasses.fields(cls) if field.init or not of_init]


class ConfigError(BatchmillError, ValueError):
    """A setting is outside what is allowed."""

    field: str
    value: object
    allowed: str
    exit_code = 2
    template = "{field}={value!r} is not valid: it must be {allowed}"


def check_int(field: str, value: object, least: int) -> None:
    """Raise ConfigError unless a setting is a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(field, value, f"a whole number of at least {least:,}")


def check_number(field: str, value: object, least: float) -> None:
    """Raise ConfigError unless a setting is a number of at least ``least``."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not value >= least:  # type: ignore[operator]  # also refuses NaN
        raise ConfigError(field, value, f"a number of at least {least:,g}")


def check_ints(settings: object, least: int, *names: str) -> None:
    """Check several settings as :func:`check_int` does."""
    for name in names:
        check_int(name, getattr(settings, name), least)


def check_numbers(settings: object, least: float, *names: str) -> None:
    """Check several settings as :func:`check_number` does."""
    for name in names:
        check_number(name, getattr(settings, name), least)


def check_positive(settings: object, *names: str) -> None:
    """Raise ConfigError unless all of these settings are finite numbers above 0."""
    for name in names:
        value = getattr(settings, name)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 0 < value < math.inf:
            raise ConfigError(name, value, "a number above 0")


class MissingExtraError(BatchmillError, ImportError):
    """A part of batchmill needs packages that are not installed."""

    feature: str
    """What needs them."""
    extra: str
    """The extra that brings them; several have commas between them."""
    reason: str

    def __str__(self) -> str:
        many = "," in self.extra
        return (
            f"{self.feature} needs the {'extras' if many else 'extra'} {self.extra!r} "
            f"({self.reason}): install {'them' if many else 'it'} with: "
            f"pip install 'batchmill[{self.extra}]'"
        )


class QueueExistsError(BatchmillError, ValueError):
    """A queue of that name is running already."""

    name: str
    template = (
        "a queue named {name!r} exists already: "
        "use get_or_create() to share it, or shut it down first"
    )


class QueueConflictError(BatchmillError, ValueError):
    """A queue is wanted in ways that exclude each other, or downstream of itself."""

    name: str
    why: str
    template = "queue {name!r}: {why}"


class HandlerExistsError(BatchmillError, ValueError):
    """That class has a handler already."""

    name: str
    """Of the queue."""
    cls: type
    template = (
        "queue {name!r} has a handler for {cls.__qualname__} already: "
        "call remove_handler() first to replace it"
    )


class QueueClosedError(BatchmillError, RuntimeError):
    """The queue, or the manager, is shutting down or shut down."""

    name: str
    what: str
    """The call that is refused."""
    template = "{name!r} is shut down, so {what} is refused: create a new one"


class SelectorError(BatchmillError, IndexError):
    """A partition selector returned something that is not a partition.

    The item that was being produced is not in the queue.
    """

    name: str
    """Of the queue."""
    answer: object
    partitions: int

    def __str__(self) -> str:
        return (
            f"queue {self.name!r}: the selector answered {self.answer!r}, "
            f"but it must answer an int from 0 to {self.partitions - 1}"
        )


class WouldDeadlockError(BatchmillError, RuntimeError):
    """A handler called its own queue for something that can only happen after it has returned."""

    name: str
    """Of the queue."""
    call: str
    template = (
        "{name!r}: {call} would wait for something that can only happen after the "
        "calling handler has returned; do it from another thread, or with timeout=0"
    )


class UnawaitedError(BatchmillError, TypeError):
    """A handler returned a coroutine, or another awaitable or a generator, that nothing runs."""

    function: str
    """The name of the handler."""
    returned: str
    """The type of what it returned."""
    template = (
        "{function} returned a {returned}, which nothing runs, so the call counts as failed: "
        "run it inside the handler, with asyncio.run(…), or on your own loop with "
        "asyncio.run_coroutine_threadsafe(…, loop).result()"
    )
