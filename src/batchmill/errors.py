"""Every error batchmill raises on purpose.

Each one also inherits the built-in that a caller would catch anyway, keeps what it knows as
attributes, survives pickling, and ends with what to do about it.
"""

from __future__ import annotations


class BatchmillError(Exception):
    """Base of every error that batchmill raises on purpose."""


class ConfigError(BatchmillError, ValueError):
    """A setting is outside what is allowed; carries ``field``, ``value`` and ``allowed``."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(field, value, allowed)
        self.field = field
        self.value = value
        self.allowed = allowed

    def __str__(self) -> str:
        return f"{self.field}={self.value!r} is not valid: it must be {self.allowed}"


class MissingExtraError(BatchmillError, ImportError):
    """A part of batchmill needs packages that are not installed.

    Carries ``feature`` (what needs them), ``extra`` (the extra that brings them) and ``reason``.
    """

    def __init__(self, feature: str, extra: str, reason: str) -> None:
        super().__init__(feature, extra, reason)
        self.feature = feature
        self.extra = extra
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"{self.feature} needs the extra {self.extra!r} ({self.reason}): "
            f"install it with: pip install 'batchmill[{self.extra}]'"
        )


class QueueExistsError(BatchmillError, ValueError):
    """A queue of that name is running already; carries ``name``."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name

    def __str__(self) -> str:
        return (
            f"a queue named {self.name!r} exists already: "
            "use get_or_create() to share it, or shut it down first"
        )


class QueueConflictError(BatchmillError, ValueError):
    """Two callers want one queue in ways that exclude each other; carries ``name`` and ``why``."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(name, why)
        self.name = name
        self.why = why

    def __str__(self) -> str:
        return f"queue {self.name!r}: {self.why}"


class HandlerExistsError(BatchmillError, ValueError):
    """That class has a handler already; carries ``name`` (of the queue) and ``cls``."""

    def __init__(self, name: str, cls: type) -> None:
        super().__init__(name, cls)
        self.name = name
        self.cls = cls

    def __str__(self) -> str:
        return (
            f"queue {self.name!r} has a handler for {self.cls.__qualname__} already: "
            "call remove_handler() first to replace it"
        )


class QueueClosedError(BatchmillError, RuntimeError):
    """The queue, or the manager, is shutting down or shut down; carries ``name``."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(name, what)
        self.name = name
        self.what = what

    def __str__(self) -> str:
        return f"{self.name!r} is shut down, so {self.what} is refused: create a new one"


class SelectorError(BatchmillError, IndexError):
    """A partition selector answered something that is not a partition.

    Carries ``name`` (of the queue), ``answer`` and ``partitions``.
    The item that was being produced is not in the queue.
    """

    def __init__(self, name: str, answer: object, partitions: int) -> None:
        super().__init__(name, answer, partitions)
        self.name = name
        self.answer = answer
        self.partitions = partitions

    def __str__(self) -> str:
        return (
            f"queue {self.name!r}: the selector answered {self.answer!r}, "
            f"but it must answer an int from 0 to {self.partitions - 1}"
        )


class WouldDeadlockError(BatchmillError, RuntimeError):
    """A handler asked its own queue for something that only this handler's return could bring.

    Carries ``name`` (of the queue) and ``call``.
    """

    def __init__(self, name: str, call: str) -> None:
        super().__init__(name, call)
        self.name = name
        self.call = call

    def __str__(self) -> str:
        return (
            f"{self.name!r}: {self.call} would wait for something that can only happen after the "
            "calling handler has returned; do it from another thread, or with timeout=0"
        )
