"""QueueFullError: what it carries, what it says, and that it travels."""

from __future__ import annotations

import pickle
import queue

import pytest

from batchmill import BatchmillError
from batchmill.batcher import (
    BackendContractError,
    BatcherClosedError,
    CircuitOpenError,
    DeadlineExceededError,
    DroppedError,
)
from batchmill.pressure import QueueFullError, ThresholdLevel


def test_it_carries_what_it_knows() -> None:
    """Depth, threshold, level, and when to come back."""
    error = QueueFullError(12, 10, ThresholdLevel.CRITICAL, 0.5)
    assert (error.depth, error.threshold, error.level, error.retry_after) == (
        12,
        10,
        ThresholdLevel.CRITICAL,
        0.5,
    )


def test_a_text_alone_is_enough() -> None:
    """QueueFullError("text") says the text, and knows nothing else."""
    error = QueueFullError("no room at the inn")
    assert str(error) == "no room at the inn"
    assert (error.depth, error.threshold, error.level, error.retry_after) == (0, 0, None, None)


def test_it_is_queue_full() -> None:
    """Code that catches the standard library's error catches this one."""
    assert issubclass(QueueFullError, queue.Full)
    assert issubclass(QueueFullError, BatchmillError)


@pytest.mark.parametrize(
    ("error", "parts"),
    [
        (QueueFullError(12, 10, ThresholdLevel.CRITICAL, 0.5), ["CRITICAL", "12", "10", "0.5 s"]),
        (QueueFullError(9, 8, None), ["hard capacity", "slow down"]),
        (QueueFullError(9, 8, None, None, "given up"), ["; given up;"]),
    ],
)
def test_the_message_tells_what_to_do(error: QueueFullError, parts: list[str]) -> None:
    """Where, how deep, what limit, and the next step."""
    assert [part for part in parts if part not in str(error)] == []


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (QueueFullError(12, 10, ThresholdLevel.WARNING, 0.5, "why"), queue.Full),
        (QueueFullError("text"), queue.Full),
        (QueueFullError(12, 10, ThresholdLevel.WARNING, text="text"), queue.Full),
        (DroppedError(ThresholdLevel.CRITICAL), RuntimeError),
        (BackendContractError(3, "2 results"), TypeError),
        (BatcherClosedError("why"), RuntimeError),
        (DeadlineExceededError(1.5), TimeoutError),
        (CircuitOpenError(3.0), ConnectionError),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_it_travels(error: BatchmillError, builtin: type[Exception], protocol: int) -> None:
    """Pickled, it is of the same class, says the same, carries the same; and is the built-in."""
    back = pickle.loads(pickle.dumps(error, protocol))
    assert (type(back), str(back), vars(back)) == (type(error), str(error), vars(error))
    assert isinstance(back, builtin)
