"""When whole batches fail: bisect, retries, the circuit breaker."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from batchmill import ConfigError
from batchmill.batcher import (
    BackendContractError,
    BatcherSettings,
    BreakerPolicy,
    CircuitOpenError,
    MicroBatcher,
    RetryPolicy,
    bisect,
)
from batchmill.batcher.backend import CircuitBreaker
from batchmill.testing import ManualClock
from tests.kit.batchers import FOREVER_MS, Failing, answer, batching
from tests.kit.threads import WAIT_S


def _send(backend: Any, count: int, **settings: Any) -> tuple[list[Any], Any]:
    with batching(backend, linger_ms=FOREVER_MS, batch_size=count, **settings) as batcher:
        futures = batcher.submit_many(range(count))
        return [answer(future) for future in futures], batcher.stats()


def test_bisect_isolates_the_poison_item() -> None:
    """The others succeed; the poison item fails with the backend's error."""
    results, stats = _send(Failing(5), 8, on_batch_failure=bisect())
    assert [result.item for result in results if result.is_failure] == [5]
    assert isinstance(results[5].error, ValueError)
    assert (stats.succeeded, stats.failed, stats.batches) == (7, 1, 1)


def test_bisect_keeps_the_order() -> None:
    """Each half is sent in order, the first one first."""
    backend = Failing(2)
    _send(backend, 4, on_batch_failure=bisect())
    assert backend.batches == [[0, 1, 2, 3], [0, 1], [2, 3], [2], [3]]


def test_bisect_finds_several() -> None:
    """However they lie."""
    results, _ = _send(Failing(0, 3, 7), 8, on_batch_failure=bisect())
    assert [result.item for result in results if result.is_failure] == [0, 3, 7]


@pytest.mark.parametrize("max_calls", [3, 4, 9, 64])
def test_bisect_calls_no_more_than_it_may(max_calls: int) -> None:
    """Past that, what is left fails together."""
    backend = Failing(*range(16))
    results, stats = _send(backend, 16, on_batch_failure=bisect(max_calls))
    assert len(backend.batches) <= max_calls
    assert stats.backend_calls == len(backend.batches)
    assert all(result.is_failure for result in results)


def test_without_bisect_the_batch_fails_as_one() -> None:
    """It is an option, off by default."""
    backend = Failing(1)
    results, _ = _send(backend, 3)
    assert [result.is_failure for result in results] == [True] * 3
    assert len(backend.batches) == 1


@pytest.mark.parametrize("option", [{"on_batch_failure": bisect()}, {"retry": RetryPolicy()}])
def test_a_broken_contract_is_not_tried_again(option: dict[str, Any]) -> None:
    """The backend took the items: sending them again would only double them."""
    calls: list[Any] = []

    def backend(batch: list[Any]) -> list[Any]:
        calls.append(batch)
        return []

    results, _ = _send(backend, 4, **option)
    assert len(calls) == 1
    assert isinstance(results[0].error, BackendContractError)


def _flaky(failures: int) -> Any:
    left = [failures]

    def backend(batch: list[Any]) -> list[Any]:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(f"{left[0]} more")
        return batch

    return backend


QUICK = RetryPolicy(max_attempts=3, initial_ms=0.01, max_ms=0.01)


def test_a_failed_batch_is_sent_again() -> None:
    """And nobody sees the failures."""
    results, stats = _send(_flaky(2), 3, retry=QUICK)
    assert all(result.is_success for result in results)
    assert (stats.retries, stats.backend_calls, stats.batches) == (2, 3, 1)


def test_retries_end() -> None:
    """After max_attempts calls the items fail with the last error."""
    results, stats = _send(_flaky(9), 1, retry=QUICK)
    assert str(results[0].error) == "6 more"
    assert stats.backend_calls == 3


def test_only_what_is_worth_it_is_retried() -> None:
    """Errors outside retry_on fail at once."""
    policy = RetryPolicy(retry_on=(ConnectionError,))
    _, stats = _send(_flaky(1), 1, retry=policy)
    assert stats.retries == 0


def test_retries_wait_on_the_clock() -> None:
    """The second call comes after the delay, not before."""
    clock = ManualClock()
    called = threading.Semaphore(0)
    flaky = _flaky(1)

    def backend(batch: list[Any]) -> list[Any]:
        called.release()
        return list(flaky(batch))

    policy = RetryPolicy(initial_ms=500, jitter=0)
    with batching(backend, clock=clock, linger_ms=0, retry=policy) as batcher:
        future = batcher.submit("a")
        assert called.acquire(timeout=WAIT_S)
        assert clock.await_sleepers()
        clock.advance(0.25)
        assert not called.acquire(blocking=False)
        clock.advance(0.25)
        assert answer(future).is_success


def test_parts_of_a_batch_are_not_retried() -> None:
    """The whole batch is, three times; then it is split, and each part is sent once."""
    calls: list[int] = []

    def backend(batch: list[int]) -> list[int]:
        calls.append(len(batch))
        if 3 in batch:
            raise ValueError("poison")
        return batch

    results, stats = _send(backend, 4, retry=QUICK, on_batch_failure=bisect())
    assert calls == [4, 4, 4, 2, 2, 1, 1]
    assert [result.is_success for result in results] == [True, True, True, False]
    assert stats.retries == 2


@pytest.mark.parametrize(
    ("attempt", "chance", "delay"),
    [(1, 0, 10), (2, 0, 20), (3, 0, 40), (4, 0, 50), (1, 1, 9), (9, 0, None)],
)
def test_retry_delays(attempt: int, chance: float, delay: float | None) -> None:
    """Doubled each time, capped, less the jitter; None to give up."""
    policy = RetryPolicy(max_attempts=9, initial_ms=10, max_ms=50, jitter=0.1)
    assert policy.delay_ms(attempt, OSError(), lambda: chance) == delay


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: bisect(2), "max_calls"),
        (lambda: RetryPolicy(max_attempts=0), "max_attempts"),
        (lambda: RetryPolicy(initial_ms=0), "initial_ms"),
        (lambda: RetryPolicy(multiplier=0.5), "multiplier"),
        (lambda: RetryPolicy(jitter=1), "jitter"),
        (lambda: BreakerPolicy(failures=0), "failures"),
        (lambda: BreakerPolicy(reset_after_s=0), "reset_after_s"),
    ],
)
def test_policies_check_themselves(make: Any, field: str) -> None:
    """A wrong setting is named."""
    with pytest.raises(ConfigError, match=field):
        make()


def test_the_breaker_opens_after_failures_in_a_row() -> None:
    """A success in between starts the count anew."""
    breaker = CircuitBreaker(BreakerPolicy(failures=2, reset_after_s=10))
    for ok in (False, True, False):
        breaker.record(ok, 0)
    assert breaker.blocked_for(0) is None
    breaker.record(False, 0)
    assert breaker.blocked_for(4) == 6
    assert breaker.opened == 1


def test_half_open_lets_one_through() -> None:
    """The others wait for what comes of it."""
    breaker = CircuitBreaker(BreakerPolicy(failures=1, reset_after_s=10))
    breaker.record(False, 0)
    assert breaker.blocked_for(10) is None
    assert breaker.blocked_for(10) is not None
    breaker.record(False, 10)
    assert breaker.blocked_for(19) == 1
    assert breaker.opened == 2
    assert breaker.blocked_for(20) is None
    breaker.record(True, 20)
    assert breaker.blocked_for(20) is None


def test_an_open_circuit_spares_the_backend() -> None:
    """Items fail at once, told when to come back; later one batch tries, and closes it."""
    clock = ManualClock()
    backend = Failing("bad")
    policy = BreakerPolicy(failures=2, reset_after_s=30)
    with batching(backend, clock=clock, linger_ms=0, breaker=policy) as batcher:
        for _ in range(2):
            assert isinstance(answer(batcher.submit("bad")).error, ValueError)
        refused = answer(batcher.submit("good")).error
        assert isinstance(refused, CircuitOpenError)
        assert refused.retry_after == 30
        clock.advance(30)
        assert answer(batcher.submit("good")).is_success
        stats = batcher.stats()
    assert backend.items == ["bad", "bad", "good"]
    assert (stats.breaker_opened, stats.backend_calls, stats.failed) == (1, 3, 3)


def test_a_circuit_that_opens_between_retries_keeps_the_cause() -> None:
    """What the backend raised is not forgotten."""
    results, _ = _send(_flaky(9), 1, retry=QUICK, breaker=BreakerPolicy(failures=1))
    assert isinstance(results[0].error, CircuitOpenError)
    assert isinstance(results[0].error.__cause__, OSError)


def test_a_poison_item_does_not_open_the_circuit() -> None:
    """Halves of a failed batch are not counted: the item is isolated, and all else is sent."""

    def backend(batch: list[int]) -> list[int]:
        if 7 in batch:
            raise ValueError("poison")
        return batch

    config = BatcherSettings(
        batch_size=100, on_batch_failure=bisect(), breaker=BreakerPolicy(failures=3)
    )
    batcher: MicroBatcher[int] = MicroBatcher(backend, config)
    with batcher:
        answers = batcher.submit_many(range(100))
    assert [item for item, answer in enumerate(answers) if not answer.result().is_success] == [7]
    assert batcher.stats().breaker_opened == 0
