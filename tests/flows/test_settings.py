from __future__ import annotations

import dataclasses
import math
import os
import pickle
from typing import Any

import pytest

from batchmill import BatchmillError, ConfigError
from batchmill.flows import Backpressure, FlowDispatcher, FlowSettings
from tests.flows.kit import Recorder, config, dispatching


def test_the_defaults_are_the_documents() -> None:
    """64 Ki signals in the ingress buffer, 8 Ki a worker, 128 a call, and nothing is dropped."""
    settings = FlowSettings()
    assert settings.ingress_capacity == 65_536
    assert settings.worker_queue_capacity == 8_192
    assert settings.batch_max == 128
    assert settings.backpressure is Backpressure.BLOCK


@pytest.mark.parametrize(("cores", "workers"), [(1, 1), (4, 4), (8, 8), (64, 8)])
def test_there_is_a_worker_for_each_core_up_to_eight(
    monkeypatch: pytest.MonkeyPatch, cores: int, workers: int
) -> None:
    """worker_count is min(cores, 8) unless it is given; stats have the cores and the workers."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    monkeypatch.setattr("batchmill.cores.cpu_quota", lambda: None)
    assert FlowSettings().worker_count == workers
    with FlowDispatcher(Recorder()) as dispatcher:
        stats = dispatcher.stats()
    assert (stats.cores, stats.worker_count) == (cores, workers)


def test_the_container_quota_limits_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container with two CPUs on a machine of 64 cores gets two workers, not eight."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    monkeypatch.setattr("batchmill.cores.cpu_quota", lambda: 1.5)
    with FlowDispatcher(Recorder()) as dispatcher:
        stats = dispatcher.stats()
    assert (stats.cores, stats.worker_count) == (2, 2)


def test_the_config_is_frozen() -> None:
    """Settings cannot be changed under a running dispatcher."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        FlowSettings().batch_max = 3  # type: ignore[misc]


def test_the_config_takes_keywords_only() -> None:
    """A bare number could be any of the capacities."""
    with pytest.raises(TypeError):
        FlowSettings(4)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("worker_count", 0, "a whole number of at least 1"),
        ("worker_count", True, "a whole number of at least 1"),
        ("ingress_capacity", -1, "a whole number of at least 0"),
        ("worker_queue_capacity", 1.5, "a whole number of at least 1"),
        ("batch_max", "8", "a whole number of at least 1"),
        ("backpressure", "block", "a Backpressure"),
        ("assignment", max, "an object with a method pick(workers)"),
        ("flow_id", None, "a callable signal -> hashable or None"),
        ("finished", 1, "a callable signal -> bool, or None"),
        ("idle_ttl", 0, "a finite number of seconds above 0, or None"),
        ("idle_ttl", math.nan, "a finite number of seconds above 0, or None"),
        ("idle_ttl", "1", "a finite number of seconds above 0, or None"),
        ("max_flows", 0, "a whole number of at least 1, or None"),
        ("close_timeout", None, "a finite number of seconds above 0"),
        ("close_timeout", math.inf, "a finite number of seconds above 0"),
    ],
)
def test_a_wrong_setting_is_named_with_its_value_and_what_is_allowed(
    name: str, value: object, allowed: str
) -> None:
    """A ConfigError carries field, value and allowed, and says all three."""
    with pytest.raises(ConfigError) as caught:
        FlowSettings(**{name: value})  # type: ignore[arg-type]
    error = caught.value
    assert (error.field, error.allowed) == (name, allowed)
    assert str(error) == f"{name}={value!r} is not valid: it must be {allowed}"
    assert isinstance(pickle.loads(pickle.dumps(error)), BatchmillError)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("handler", {"handler": 3}),
        ("config", {"handler": print, "config": {"batch_max": 1}}),
        ("error_handler", {"handler": print, "error_handler": "log"}),
    ],
)
def test_a_dispatcher_checks_what_it_is_made_from(name: str, arguments: dict[str, Any]) -> None:
    """A wrong argument is a ConfigError too, before any thread is started."""
    with pytest.raises(ConfigError) as caught:
        FlowDispatcher(**arguments)
    assert caught.value.field == name


def test_without_flow_id_it_is_the_attribute_of_that_name() -> None:
    """A signal that has a ``flow_id`` needs no function to find it."""

    class Event:
        flow_id = 7

    assert FlowSettings().flow_id(Event()) == 7


def test_a_dispatcher_shows_its_name_and_settings() -> None:
    """Name and config are what it was made with; repr says how it is."""
    settings = config()
    dispatcher = FlowDispatcher(Recorder(), settings, name="orders")
    assert (dispatcher.name, dispatcher.config) == ("orders", settings)
    assert repr(dispatcher) == "<FlowDispatcher 'orders' running>"
    dispatcher.close()
    assert repr(dispatcher) == "<FlowDispatcher 'orders' closed>"


def test_a_dispatcher_works_without_a_config() -> None:
    """All settings have a default."""
    with FlowDispatcher(Recorder()) as dispatcher:
        assert dispatcher.config.worker_count >= 1
    with dispatching(Recorder()) as other:
        assert other.running
