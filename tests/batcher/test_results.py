"""What becomes of an item: positional results, failures, and answers nobody waits for."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from typing import Any

import pytest

from batchmill import ConfigError
from batchmill.batcher import (
    BackendContractError,
    BatcherSettings,
    BatchResult,
    DroppedError,
    ItemResult,
    MicroBatcher,
    Outcome,
)
from batchmill.pressure import ThresholdLevel
from tests.kit.batchers import FOREVER_MS, LOGGER, Echo, answer, batching, held, levels
from tests.kit.threads import WAIT_S


def _answers(backend: Any, items: list[Any]) -> list[ItemResult[Any]]:
    with batching(backend, linger_ms=FOREVER_MS, batch_size=len(items)) as batcher:
        return [answer(future) for future in batcher.submit_many(items)]


def test_results_are_positional() -> None:
    """The n-th result is the n-th item's, and each result carries its item."""
    results = _answers(lambda batch: [item * 10 for item in batch], [3, 1, 2])
    assert [(result.item, result.value) for result in results] == [(3, 30), (1, 10), (2, 20)]
    assert all(result.is_success for result in results)


def test_equal_items_are_different_items() -> None:
    """Each has an answer of its own, even if the backend's answers differ."""
    results = _answers(lambda batch: list(range(len(batch))), ["same", "same", "same"])
    assert [result.value for result in results] == [0, 1, 2]


def test_items_that_cannot_be_hashed_or_compared() -> None:
    """Nothing looks into an item."""

    class Odd:
        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: object) -> bool:
            raise RuntimeError("do not compare me")

    assert [result.value for result in _answers(lambda batch: [1, 2], [Odd(), Odd()])] == [1, 2]


@pytest.mark.parametrize("value", [None, False, 0, "", []])
def test_any_value_is_a_success(value: object) -> None:
    """Empty ones too."""
    (result,) = _answers(lambda batch: [value], ["item"])
    assert (result.outcome, result.unwrap()) == (Outcome.SUCCESS, value)


@pytest.mark.parametrize("wrong", [[], [1], [1, 2, 3], None, 7, "ab", b"ab", {1: 2, 3: 4}])
def test_an_answer_that_does_not_fit_fails_the_batch(wrong: Any) -> None:
    """One result per item, or none of them can be trusted."""
    results = _answers(lambda batch: wrong, ["a", "b"])
    assert [type(result.error) for result in results] == [BackendContractError] * 2
    assert [result.item for result in results] == ["a", "b"]


def test_the_contract_error_says_what_was_wrong() -> None:
    """How many were given, and what came back."""
    (result, _) = _answers(lambda batch: [1, 2, 3], ["a", "b"])
    assert "was given 2 items and returned 3 results" in str(result.error)


def test_an_exception_instance_fails_its_item_alone() -> None:
    """The others of the batch succeed."""
    error = ValueError("bad item")
    good, bad, other = _answers(lambda batch: [1, error, 3], ["a", "b", "c"])
    assert (good.value, bad.error, other.value) == (1, error, 3)
    assert bad.is_failure


def test_a_backend_that_raises_fails_its_batch() -> None:
    """Every item of it, each with its own result; the next batch is sent as usual."""
    calls: list[Any] = []

    def backend(batch: list[Any]) -> list[Any]:
        calls.append(batch)
        if len(calls) == 1:
            raise OSError("down")
        return batch

    with batching(backend, linger_ms=FOREVER_MS, batch_size=2) as batcher:
        first = [answer(future) for future in batcher.submit_many("ab")]
        second = [answer(future) for future in batcher.submit_many("cd")]
        stats = batcher.stats()
    assert [(result.item, str(result.error)) for result in first] == [
        ("a", "down"),
        ("b", "down"),
    ]
    assert [result.value for result in second] == ["c", "d"]
    assert (stats.succeeded, stats.failed) == (2, 2)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_even_an_exit_fails_only_its_batch(error: BaseException) -> None:
    """The worker lives on."""

    def backend(batch: list[Any]) -> list[Any]:
        if batch == ["bad"]:
            raise error
        return batch

    with batching(backend, linger_ms=0) as batcher:
        assert answer(batcher.submit("bad")).error is error
        assert answer(batcher.submit("good")).is_success


def test_a_backend_may_be_an_object() -> None:
    """With dispatch(batch) -> BatchResult."""

    class Store:
        def dispatch(self, batch: list[Any]) -> BatchResult:
            return BatchResult([item + 1 for item in batch])

    assert [result.value for result in _answers(Store(), [1, 2])] == [2, 3]


def test_a_backend_that_cannot_be_called_is_refused() -> None:
    """At once, and it is named."""
    with pytest.raises(ConfigError, match=r"backend=5 .* dispatch\(\)"):
        MicroBatcher(5)  # type: ignore[call-overload]


def test_a_backend_may_change_its_list() -> None:
    """It is its own."""

    def backend(batch: list[Any]) -> list[Any]:
        return [batch.pop(0) for _ in range(len(batch))]

    assert [result.value for result in _answers(backend, [1, 2])] == [1, 2]


def test_unwrap_gives_the_value_or_raises() -> None:
    """The failure's own error; DroppedError with the level for a dropped item."""
    error = OSError("no")
    assert ItemResult("a", Outcome.SUCCESS, 5).unwrap() == 5
    with pytest.raises(OSError, match="no"):
        ItemResult("a", Outcome.FAILURE, error=error).unwrap()
    with pytest.raises(DroppedError, match="CRITICAL"):
        ItemResult("a", Outcome.DROPPED, level=ThresholdLevel.CRITICAL).unwrap()


def test_dropped_is_a_third_outcome() -> None:
    """Not a success, not a failure."""
    result = ItemResult("a", Outcome.DROPPED)
    assert (result.is_success, result.is_failure, result.is_dropped) == (False, False, True)


def test_without_thresholds_nothing_is_refused() -> None:
    """A plain batcher."""
    with held(waiting=5000) as (batcher, gate):
        gate.open()
        assert batcher.flush(WAIT_S)
        assert batcher.stats().succeeded == 5001
        assert batcher.stats().thresholds is None


def test_with_thresholds_is_the_same_as_giving_them() -> None:
    """The seed's factory."""
    echo = Echo()
    batcher: MicroBatcher[Any] = MicroBatcher.with_thresholds(echo, BatcherSettings(), levels())
    with batcher:
        assert answer(batcher.submit(1)).is_success
        assert batcher.stats().thresholds is not None


@pytest.mark.parametrize("when", ["waiting", "in flight"])
def test_a_future_that_its_owner_answered_kills_nobody(when: str) -> None:
    """Completing a done future is harmless: the loop goes on."""
    with held(waiting=0) as (batcher, gate):
        future = batcher.submit("odd")
        if when == "in flight":
            gate.let_pass()
            gate.wait_entered()
        future.set_result(ItemResult("odd", Outcome.SUCCESS, "mine"))
        other = batcher.submit("other")
        gate.open()
        assert answer(other).is_success
        assert answer(future).value == "mine"


@pytest.mark.parametrize("error", [ValueError("callback"), SystemExit("callback")])
def test_a_callback_that_raises_stops_nobody(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    """The other items of the batch are answered, counted once, and the worker lives."""

    def callback(future: Future[Any]) -> None:
        raise error

    with caplog.at_level(logging.ERROR, LOGGER), held(batch_size=3) as (batcher, gate):
        first, second = batcher.submit("a"), batcher.submit("b")
        first.add_done_callback(callback)
        gate.open()
        assert batcher.flush(WAIT_S)
        assert answer(second).is_success
        assert answer(batcher.submit("c")).is_success
        assert (batcher.stats().succeeded, batcher.stats().failed) == (4, 0)


def test_a_worker_that_fails_fails_its_batch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A fault of batchmill's own costs neither items nor the worker."""
    with batching(Echo(), linger_ms=0) as batcher:
        with monkeypatch.context() as patch:
            patch.setattr(batcher._engine.caller, "deliver", lambda items: [])
            assert answer(batcher.submit("a")).is_failure
        assert answer(batcher.submit("b")).is_success
    assert "a worker failed" in caplog.text


def test_repr_tells_the_state() -> None:
    """Name, open or closed, and how many wait."""
    with held(waiting=2, name="orders") as (batcher, _):
        assert repr(batcher) == "<MicroBatcher 'orders' open, 2 waiting>"
    assert repr(batcher) == "<MicroBatcher 'orders' closed, 0 waiting>"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": True}, "batch_size=True"),
        ({"max_in_flight": 0}, "max_in_flight=0"),
        ({"linger_ms": -1}, "linger_ms=-1"),
        ({"linger_ms": float("nan")}, "linger_ms=nan"),
        ({"max_weight": 0, "weigh": len}, "max_weight=0"),
        ({"max_weight": 5}, "weigh=None"),
        ({"weigh": 5}, "weigh=5"),
        ({"key": 5}, "key=5"),
        ({"close_timeout_s": -1}, "close_timeout_s=-1"),
    ],
)
def test_a_wrong_setting_is_named(wrong: dict[str, Any], message: str) -> None:
    """The field, its value and what is allowed."""
    with pytest.raises(ConfigError, match=message):
        BatcherSettings(**wrong)
