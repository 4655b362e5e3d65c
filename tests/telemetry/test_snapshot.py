"""Stats as JSON: of every component, with all fields and properties."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from batchmill import BatchQueueManager, BatchQueueSettings, ThreadPolicy
from batchmill.batcher import MicroBatcher
from batchmill.flows import FlowDispatcher, FlowSettings
from batchmill.pressure import QueueThresholdManager, QueueThresholdSettings
from batchmill.telemetry import Snapshot
from tests.kit.queues import Recorder, Red, make_queue


@dataclasses.dataclass(frozen=True, slots=True)
class Example(Snapshot):
    """Values that JSON does not have."""

    longest: float = float("inf")
    kinds: tuple[type, ...] = (Red,)

    @property
    def doubled(self) -> float:
        """A property, which is written, too."""
        return 2.0


def snapshots() -> dict[str, Any]:
    """The stats of one component of each kind, after some work."""
    with make_queue() as queue:
        queue.add_handler(Red, Recorder())
        queue.produce(Red(1))
        queue.flush()
        running = queue.stats()
    manager = BatchQueueManager()
    manager.create("one", BatchQueueSettings(threads=ThreadPolicy.fixed(1), consumer=print))
    managed = manager.stats()
    manager.shutdown_all()
    batcher = MicroBatcher(lambda batch: batch)
    batcher.submit(5).result()
    batcher.close()
    with FlowDispatcher(lambda batch: None, FlowSettings(worker_count=1, flow_id=str)) as flows:
        flows.dispatch(1)
    thresholds = QueueThresholdManager(QueueThresholdSettings(max_queue_size=4), lambda: 5)
    thresholds.check("item")
    thresholds.close()
    return {
        "queue": running,
        "manager": managed,
        "batcher": batcher.stats(),
        "flows": flows.stats(),
        "thresholds": thresholds.stats(),
    }


def test_stats_of_every_component_go_to_json() -> None:
    """And come back as they were: every field and every property of each is there."""
    for name, stats in snapshots().items():
        written = stats.as_json()
        assert json.loads(json.dumps(written)) == written, name
        assert {field.name for field in dataclasses.fields(stats)} <= written.keys()


def test_classes_and_keys_are_written_by_name() -> None:
    """The class of a lane with its module, the level and action of a decision with a dot."""
    stats = snapshots()
    assert stats["queue"].as_json()["partitions"][0]["classes"] == ["tests.kit.queues.Red"]
    assert stats["queue"].as_json()["pending"] == 0
    assert stats["thresholds"].as_json()["decisions"] == {"critical.reject": 1}


@pytest.mark.parametrize(
    ("name", "value"),
    [("longest", None), ("kinds", ["tests.kit.queues.Red"]), ("doubled", 2.0)],
)
def test_what_json_does_not_have(name: str, value: object) -> None:
    """Infinity is None, a class its name; a property is written like a field."""
    assert Example().as_json()[name] == value
