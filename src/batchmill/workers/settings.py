"""Settings of the workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from batchmill.aggregate import AggregationSettings
from batchmill.errors import check_int, check_number


@dataclass(frozen=True, kw_only=True)
class WorkerSettings(AggregationSettings):
    """The settings of L1, L2 and TopN workers.

    A process that is killed loses at most what came in the last ``l1_period_s + l2_period_s``, and
    the time of a commit.
    """

    l1_period_s: float = 0.5
    """How long L1 merges events before it hands their states to L2."""
    l2_period_s: float = 0.5
    """How long L2 merges states before it commits them; all at once, in one transaction."""
    l1_chunk: int = 16_384
    """How many events of a type L1 collects before it aggregates them; fewer if its period is
    over. Larger chunks cost less time an event."""
    max_waiting_bytes: int = 64 * 2**20
    """How many bytes of states may wait for a commit, when the store is slow or cannot be reached.
    Then L2 takes no more, its queue and L1's fill, and events are dropped and counted."""
    late_after_minutes: int = 5
    """An event is counted as late if it is this many minutes behind the newest one in the store."""
    ttl_days: int = 7
    """How many days before the newest event a bucket is kept, as far as the clock confirms it."""
    max_new_entities: int = 5_000
    """How many new entities of an event type a minute may bring; what is over it is counted under
    entities named ``overflow``. 0: no limit."""
    max_entities: int = 1_000_000
    """How many entities of a kind the store may have; new ones beyond it are counted under
    ``overflow``, too. 0: no limit."""
    close_timeout_s: float = 30.0
    """How long closing waits for what was accepted to be committed."""
    l1_queue: Mapping[str, Any] = field(default_factory=dict)
    """Changes to the settings of L1's queue, ``presets.l1_aggregation()``."""
    l2_queue: Mapping[str, Any] = field(default_factory=dict)
    """Changes to the settings of L2's queue, ``presets.l2_persistence()``."""
    topn_queue: Mapping[str, Any] = field(default_factory=dict)
    """Changes to the settings of TopN's queue, ``presets.topn_persistence()``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("l1_period_s", self.l1_period_s, 0)
        check_number("l2_period_s", self.l2_period_s, 0)
        check_int("l1_chunk", self.l1_chunk, 1)
        check_int("max_waiting_bytes", self.max_waiting_bytes, 1)
        check_int("late_after_minutes", self.late_after_minutes, 0)
        check_int("ttl_days", self.ttl_days, 1)
        check_int("max_new_entities", self.max_new_entities, 0)
        check_int("max_entities", self.max_entities, 0)
        check_number("close_timeout_s", self.close_timeout_s, 0)
