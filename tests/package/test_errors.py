"""The errors: what they are to a caller, what they carry, what they say, and that they travel."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

import batchmill
from batchmill import (
    BatchmillError,
    ConfigError,
    HandlerExistsError,
    MissingExtraError,
    QueueClosedError,
    QueueConflictError,
    QueueExistsError,
    SelectorError,
    UnawaitedError,
    WouldDeadlockError,
)
from tests.kit.queues import Red

ERRORS: list[tuple[BatchmillError, type[Exception], dict[str, Any], list[str]]] = [
    (
        ConfigError("buffer_size", 0, "a whole number of at least 1"),
        ValueError,
        {"field": "buffer_size", "value": 0, "allowed": "a whole number of at least 1"},
        ["buffer_size", "=0", "a whole number of at least 1"],
    ),
    (
        MissingExtraError("the spool", "spool", "pyarrow is not installed"),
        ImportError,
        {"feature": "the spool", "extra": "spool", "reason": "pyarrow is not installed"},
        ["the spool", "pyarrow is not installed", "pip install 'batchmill[spool]'"],
    ),
    (
        UnawaitedError("consume", "coroutine"),
        TypeError,
        {"function": "consume", "returned": "coroutine"},
        ["consume returned a coroutine", "asyncio.run(…)"],
    ),
    (
        QueueExistsError("orders"),
        ValueError,
        {"name": "orders"},
        ["'orders'", "get_or_create()", "shut it down"],
    ),
    (
        QueueConflictError("orders", "it runs with handlers"),
        ValueError,
        {"name": "orders", "why": "it runs with handlers"},
        ["'orders'", "it runs with handlers"],
    ),
    (
        HandlerExistsError("orders", Red),
        ValueError,
        {"name": "orders", "cls": Red},
        ["'orders'", "Red", "remove_handler()"],
    ),
    (
        QueueClosedError("orders", "add_handler()"),
        RuntimeError,
        {"name": "orders", "what": "add_handler()"},
        ["'orders'", "add_handler()", "create a new one"],
    ),
    (
        SelectorError("orders", 9, 4),
        IndexError,
        {"name": "orders", "answer": 9, "partitions": 4},
        ["'orders'", "9", "an int from 0 to 3"],
    ),
    (
        WouldDeadlockError("orders", "flush()"),
        RuntimeError,
        {"name": "orders", "call": "flush()"},
        ["'orders'", "flush()", "another thread", "timeout=0"],
    ),
]

each_error = pytest.mark.parametrize(
    "error", [row[0] for row in ERRORS], ids=lambda e: type(e).__name__
)
round_trip = pytest.mark.parametrize(
    "travel",
    [
        *(
            pytest.param(lambda e, p=p: pickle.loads(pickle.dumps(e, p)), id=f"pickle {p}")
            for p in range(pickle.HIGHEST_PROTOCOL + 1)
        ),
        pytest.param(copy.copy, id="copy"),
        pytest.param(copy.deepcopy, id="deepcopy"),
    ],
)


def test_every_public_error_is_listed_here() -> None:
    """The tests below cover each error that batchmill makes public."""
    public = {
        thing
        for thing in vars(batchmill).values()
        if isinstance(thing, type) and issubclass(thing, BatchmillError)
    }
    assert {type(row[0]) for row in ERRORS} == public - {BatchmillError}


@each_error
def test_error_is_a_batchmill_error(error: BatchmillError) -> None:
    """`except BatchmillError` catches all that batchmill raises on purpose."""
    assert isinstance(error, BatchmillError)


@pytest.mark.parametrize(("error", "builtin"), [row[:2] for row in ERRORS])
def test_error_is_the_built_in_one(error: BatchmillError, builtin: type[Exception]) -> None:
    """It is also the built-in error that a caller would catch anyway."""
    assert isinstance(error, builtin)


@pytest.mark.parametrize(("error", "attributes"), [(row[0], row[2]) for row in ERRORS])
def test_error_carries_what_it_knows(error: BatchmillError, attributes: dict[str, Any]) -> None:
    """What is in the message is there as attributes too."""
    assert {name: getattr(error, name) for name in attributes} == attributes


@pytest.mark.parametrize(("error", "parts"), [(row[0], row[3]) for row in ERRORS])
def test_message_names_it_all(error: BatchmillError, parts: list[str]) -> None:
    """The message names what was wrong, with what value, and what to do."""
    assert [part for part in parts if part not in str(error)] == []


@each_error
@round_trip
def test_error_travels(
    error: BatchmillError, travel: Callable[[BatchmillError], BatchmillError]
) -> None:
    """Pickled or copied, it is of the same class, says the same and carries the same."""
    back = travel(error)
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert vars(back) == vars(error)


def test_notes_travel_too() -> None:
    """A note that somebody added on the way is kept by pickling."""
    error = QueueExistsError("orders")
    error.add_note("while starting up")
    assert pickle.loads(pickle.dumps(error)).__notes__ == ["while starting up"]
