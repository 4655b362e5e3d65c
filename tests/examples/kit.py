"""What the tests of the queue demo share: queue stats, a meter, what a terminal shows."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console, RenderableType

from batchmill import BatchQueueStats, PartitionStats, ThreadLoad, presets
from examples.queue_demo.view import Meter, Snapshot

NAMES = (
    presets.METRICS_L1_AGGREGATION,
    presets.METRICS_L2_PERSISTENCE,
    presets.TOPN_PERSISTENCE,
    presets.JDBC_BATCH_PERSISTENCE,
)


def queue(
    name: str = NAMES[0],
    *,
    accepted: int = 0,
    consumed: int = 0,
    failed: int = 0,
    full: int = 0,
    unregistered: int = 0,
    rebalances: int = 0,
    busy: tuple[float, ...] = (0.0, 0.0),
) -> BatchQueueStats:
    """Stats with these numbers, the others 0."""
    row = PartitionStats(
        index=0, used=0, capacity=100, drained=accepted, refused=full, thread=0, classes=()
    )
    return BatchQueueStats(
        name=name,
        running=True,
        partitions=tuple(replace(row, index=index) for index in range(40)),
        threads=tuple(
            ThreadLoad(index=index, partitions=20, items=0, busy_seconds=seconds)
            for index, seconds in enumerate(busy)
        ),
        accepted=accepted,
        consumed=consumed,
        failed=failed,
        dropped={"full": full, "stopped": 0, "unregistered": unregistered},
        rebalances=rebalances,
        moved_partitions=14 * rebalances,
        flush_cycles=0,
        idle_cycles=0,
        recovered_slots=0,
    )


def rebalanced_meter(*, four: bool = False) -> Meter:
    """Two threads, 0.8 and 0.4 busy for two seconds, 0.6 each for two after the rebalance."""

    def snapshot(at_s: float, rebalances: int, busy: tuple[float, float]) -> Snapshot:
        done = int(at_s * 99_999)
        stats = queue(accepted=done, consumed=done, full=12_345, rebalances=rebalances, busy=busy)
        names = NAMES[: 4 if four else 1]
        return Snapshot(at_s, tuple(replace(stats, name=name) for name in names))

    meter = Meter(snapshot(0.0, 0, (0.0, 0.0)))
    meter.add(snapshot(2.0, 0, (1.6, 0.8)))
    meter.add(snapshot(2.5, 1, (2.0, 1.0)))
    meter.add(snapshot(4.5, 1, (3.2, 2.2)))
    return meter


def drawn(what: RenderableType, width: int = 80) -> str:
    """What a terminal of that width shows."""
    console = Console(width=width, height=24, color_system=None)
    with console.capture() as capture:
        console.print(what)
    return capture.get()
