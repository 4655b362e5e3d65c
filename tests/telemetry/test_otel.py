"""What OpenTelemetry's real SDK collects of our components."""

from __future__ import annotations

import threading
from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, Sum

from batchmill.telemetry import Distribution, Registry, observe
from tests.kit.queues import make_queue, reds
from tests.kit.threads import WAIT_S
from tests.telemetry.kit import Tool


def collected(reader: InMemoryMetricReader) -> dict[str, Any]:
    """All metrics that the reader has now, by name."""
    data = reader.get_metrics_data()
    assert data is not None
    return {
        metric.name: metric
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }


def points(metric: Any) -> dict[tuple[tuple[str, Any], ...], Any]:
    """The values of a metric, by their attributes."""
    return {
        tuple(sorted(point.attributes.items())): point.value for point in metric.data.data_points
    }


def test_names_units_and_attributes() -> None:
    """Names with dots, units in UCUM, attributes in the namespace of the kind."""
    registry, reader = Registry(), InMemoryMetricReader()
    provider = MeterProvider([reader])
    times = Distribution((0.5, 10.0), (1, 2, 1), 33.5)
    tool = Tool(made=3, broken={"bent": 1}, depth=2, level=1, times=times)
    registry.register(tool)
    observe(provider, registry)
    metrics = collected(reader)
    provider.shutdown()
    drill = ("batchmill.tool.name", "drill")
    made = metrics["batchmill.tool.made_parts"]
    assert (made.unit, made.description) == ("{part}", "Parts made.")
    assert isinstance(made.data, Sum)
    assert made.data.is_monotonic
    assert points(made) == {(drill,): 3}
    broken = points(metrics["batchmill.tool.broken_parts"])
    assert broken == {(drill, ("batchmill.tool.reason", "bent")): 1}
    depth = metrics["batchmill.tool.depth"]
    assert not depth.data.is_monotonic
    assert points(metrics["batchmill.tool.level"]) == {(drill,): 1}
    assert points(metrics["batchmill.tool.work.count"]) == {(drill,): 4}
    total = metrics["batchmill.tool.work.sum"]
    assert (total.unit, points(total)) == ("s", {(drill,): 33.5})


def test_every_export_reads_the_registry_once() -> None:
    """Though each of dozens of instruments has a callback of its own; and each reads anew."""
    registry, reader, reads = Registry(), InMemoryMetricReader(), []

    class Counted(Tool):
        def stats(self) -> Any:
            reads.append(1)
            return self.now

    tool = Counted(made=1)
    registry.register(tool)
    provider = MeterProvider([reader])
    observe(provider, registry)
    values: list[int] = []
    for made in (1, 2, 3):
        tool.now.made = made
        values += points(collected(reader)["batchmill.tool.made_parts"]).values()
    provider.shutdown()
    assert values == [1, 2, 3]
    assert len(reads) == 3


def test_queues_are_collected() -> None:
    """Those that are made after the instruments, too."""
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    observe(provider)
    with make_queue("late-bird", consumer=lambda batch: None) as queue:
        queue.produce_many(reds(100))
        assert queue.flush(WAIT_S)
        metrics = collected(reader)
    provider.shutdown()
    bird = ("batchmill.queue.name", "late-bird")
    assert points(metrics["batchmill.queue.consumed_items"])[(bird,)] == 100
    assert points(metrics["batchmill.queue.batch_size.sum"])[(bird,)] == 100
    assert points(metrics["batchmill.queue.used"])[(bird,)] == 0


def test_a_kind_that_is_made_later_is_collected() -> None:
    """A package that is imported after the instruments were made has instruments, too."""
    from batchmill.telemetry import ComponentKind, counter

    registry, reader = Registry(), InMemoryMetricReader()
    provider = MeterProvider([reader])
    observe(provider, registry)
    kind: ComponentKind[int] = ComponentKind(
        "newcomer", (counter("steps", "{step}", "Steps.", lambda stats: stats),)
    )

    class Newcomer:
        name = ""

        def __init__(self) -> None:
            self.kind = kind

        def stats(self) -> int:
            return 7

    newcomer = Newcomer()
    registry.register(newcomer)
    metrics = collected(reader)
    provider.shutdown()
    assert points(metrics["batchmill.newcomer.steps"]) == {(): 7}


def test_readers_at_the_same_time() -> None:
    """Two readers of one provider get whole exports, while queues come and go."""
    readers = [InMemoryMetricReader(), InMemoryMetricReader()]
    provider = MeterProvider(readers)
    registry, tool = Registry(), Tool(made=1)
    registry.register(tool)
    observe(provider, registry)
    seen: list[list[int]] = [[], []]

    def read(index: int) -> None:
        for _ in range(50):
            seen[index] += points(collected(readers[index])["batchmill.tool.made_parts"]).values()

    threads = [threading.Thread(target=read, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(1_000):
        tool.now.made += 1
    for thread in threads:
        thread.join(WAIT_S)
    provider.shutdown()
    for values in seen:
        assert len(values) == 50
        assert values == sorted(values)
