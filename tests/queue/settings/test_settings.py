"""BatchQueueSettings: what it starts from, what it refuses, and how it says so."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from typing import Any

import pytest

from batchmill import (
    BatchQueue,
    BatchQueueSettings,
    BufferStrategy,
    ConfigError,
    DrainBalancer,
    PartitionPolicy,
    ThreadPolicy,
)
from batchmill.queue.strategies import TypeHash
from tests.kit.queues import Recorder, Red, make_queue
from tests.queue.kit import Idler

ONE = ThreadPolicy.fixed(1)
POOL = ("pool", ThreadPolicy.fixed(1))

COUNT = "a whole number of at least 1"
TIME = "a finite number above 0"
PAIR = "a pair of a non-empty name and a ThreadPolicy"


class NotAHandler:
    pass


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("shared_scheduler", None),
        ("partitions", PartitionPolicy.fixed(1)),
        ("buffer_size", 10_000),
        ("strategy", BufferStrategy.BLOCKING),
        ("consumer", None),
        ("serialize", False),
        ("error_handler", None),
        ("min_idle_ms", 1),
        ("max_idle_ms", 50),
        ("balancer", None),
    ],
)
def test_default(field: str, value: object) -> None:
    """What is not given is what the documentation says."""
    assert getattr(BatchQueueSettings(threads=ONE), field) == value


def test_default_selector_goes_by_class() -> None:
    """Items go by class unless a selector is given."""
    assert isinstance(BatchQueueSettings(threads=ONE).selector, TypeHash)


def test_config_is_frozen() -> None:
    """A running queue's settings cannot be changed under it."""
    config = BatchQueueSettings(threads=ONE)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.buffer_size = 1  # type: ignore[misc]


def test_config_is_keyword_only() -> None:
    """Settings are given by name: nobody can mix two of them up by place."""
    with pytest.raises(TypeError, match="positional"):
        BatchQueueSettings(ONE)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({}, "threads"),
        ({"threads": ONE, "shared_scheduler": POOL}, "threads"),
    ],
    ids=["neither", "both"],
)
def test_threads_or_shared_scheduler(settings: dict[str, Any], field: str) -> None:
    """Exactly one of threads and shared_scheduler has to be given."""
    with pytest.raises(ConfigError, match="exactly one of the two") as caught:
        BatchQueueSettings(**settings)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("threads", 4, "a ThreadPolicy"),
        ("partitions", 4, "a PartitionPolicy"),
        ("selector", 3, "a callable (item, count) -> int"),
        ("buffer_size", 0, COUNT),
        ("buffer_size", -1, COUNT),
        ("buffer_size", 10.0, COUNT),
        ("buffer_size", True, COUNT),
        ("buffer_size", None, COUNT),
        ("strategy", "blocking", "a BufferStrategy"),
        ("consumer", 3, "a callable, or an object with consume(batch)"),
        ("error_handler", 3, "a callable (batch, error), or has on_error(batch, error)"),
        ("serialize", "no", "True or False"),
        ("max_batch", 0, COUNT),
        ("max_batch", 1.5, COUNT),
        ("min_idle_ms", 0, TIME),
        ("min_idle_ms", -1, TIME),
        ("min_idle_ms", float("nan"), TIME),
        ("max_idle_ms", float("inf"), TIME),
        ("max_idle_ms", "50", "a number above 0"),
        ("max_idle_ms", 0.5, "at least min_idle_ms, 1"),
        ("balancer", 3, "a DrainBalancer"),
        ("rebalance_interval_ms", 0, TIME),
        ("shutdown_timeout_ms", 0, TIME),
        ("shutdown_timeout_ms", True, "a number above 0"),
    ],
)
def test_bad_value_is_refused(field: str, value: object, allowed: str) -> None:
    """A bad value raises a ValueError whose message has field, value and what is allowed."""
    settings: dict[str, Any] = {"threads": ONE, field: value}
    with pytest.raises(ValueError) as caught:
        BatchQueueSettings(**settings)
    assert str(caught.value) == f"{field}={value!r} is not valid: it must be {allowed}"


@pytest.mark.parametrize(
    "value", ["pool", ("pool",), ("", ONE), (3, ONE), ("pool", 4), ["pool", ONE]], ids=repr
)
def test_bad_shared_scheduler_is_refused(value: object) -> None:
    """A shared scheduler is a name and a policy; anything else raises, naming the field."""
    with pytest.raises(ConfigError) as caught:
        BatchQueueSettings(shared_scheduler=value)  # type: ignore[arg-type]
    error = caught.value
    assert (error.field, error.value, error.allowed) == ("shared_scheduler", value, PAIR)


def test_object_without_consume_is_no_consumer() -> None:
    """A consumer that is neither callable nor has consume() is refused when the config is made."""
    thing = NotAHandler()
    with pytest.raises(ConfigError) as caught:
        BatchQueueSettings(threads=ONE, consumer=thing)  # type: ignore[arg-type]
    assert caught.value.value is thing


@pytest.mark.parametrize("consumer", [print, Recorder()], ids=["callable", "object"])
def test_callables_and_objects_are_consumers(consumer: Any) -> None:
    """A consumer is a plain callable or an object with consume()."""
    assert BatchQueueSettings(threads=ONE, consumer=consumer).consumer is consumer


def test_equal_idle_bounds_are_allowed() -> None:
    """min_idle_ms may equal max_idle_ms: a back-off that does not grow."""
    config = BatchQueueSettings(threads=ONE, min_idle_ms=7, max_idle_ms=7)
    assert (config.min_idle_ms, config.max_idle_ms) == (7, 7)


def test_own_balancer_needs_no_base_class() -> None:
    """Any object with assign() is a balancer."""

    class Lazy:
        def assign(self, loads: Any, owners: Any, threads: int) -> Any:
            return owners

    lazy = Lazy()
    assert BatchQueueSettings(threads=ONE, balancer=lazy).balancer is lazy


def test_own_balancer_may_name_the_protocol() -> None:
    """A balancer may also be declared as a DrainBalancer."""

    class Lazy(DrainBalancer):
        def assign(self, loads: Any, owners: Any, threads: int) -> Any:
            return owners

    lazy = Lazy()
    assert BatchQueueSettings(threads=ONE, balancer=lazy).balancer is lazy


def test_shared_scheduler_needs_a_manager() -> None:
    """A queue made without a manager has nobody to get a shared scheduler from, and says so."""
    with pytest.raises(ConfigError, match="through a manager") as caught:
        BatchQueue("alone", BatchQueueSettings(shared_scheduler=POOL))
    assert caught.value.field == "shared_scheduler"


@pytest.mark.parametrize("millis", [1e9, sys.maxsize])
def test_long_shutdown_timeout_is_refused_or_works(millis: float) -> None:
    """A shutdown timeout that the config accepts is one that shutdown() can wait for."""
    with contextlib.suppress(ConfigError), make_queue(shutdown_timeout_ms=millis) as queue:
        assert queue.shutdown()


@pytest.mark.parametrize("millis", [1e9, sys.maxsize])
def test_long_idle_time_is_refused_or_works(millis: float) -> None:
    """An idle time that the config accepts is one that a drain thread survives."""
    settings: dict[str, Any] = {
        "min_idle_ms": millis,
        "max_idle_ms": millis,
        "shutdown_timeout_ms": 2_000,
    }
    with contextlib.suppress(ConfigError), make_queue(**settings) as queue:
        handler = Idler()
        queue.add_handler(Red, handler)
        handler.wait_idle()  # the thread is about to wait for that long
        queue.produce(Red())
        assert queue.flush(5)
