"""What the tests of the workers share: an event type, its metrics, and what a store has of them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from batchmill import Embedded
from batchmill.sources import Grain, service, source
from batchmill.store import open_store

NOON = datetime(2026, 11, 15, 12, tzinfo=UTC)


@source(entity=service("shop"))
@dataclass(frozen=True)
class MillSale:
    """An event: its amounts are powers of ten in most tests, so that a sum says which came."""

    shop: str
    cents: int
    time: datetime = NOON


@source(entity=service("shop"))
@dataclass(frozen=True)
class MillVisit:
    """An event without a time of its own, that no metric of ``OAL`` reads."""

    shop: str
    seconds: float


OAL = """
mill_sales = from(MillSale.*).count();
mill_cents = from(MillSale.cents).sum();
"""


def embedded(url: str, **settings: Any) -> Embedded:
    """One with the metrics of sales; it closes after a minute if the store does not answer."""
    given: dict[str, Any] = {"oal": OAL, "close_timeout_s": 60, "ttl_days": 3650, **settings}
    return Embedded(store=url, **given)


def totals(url: str) -> tuple[int, int]:
    """How many sales the store has, and their cents."""
    with open_store(url, create=False) as store:
        count, cents = (
            sum(value.value for value in store.values(metric, grain=Grain.DAY))  # type: ignore[misc]
            for metric in ("mill_sales", "mill_cents")
        )
        assert store.counters().get(("rows", "MillSale", ""), 0) == count
    return count, cents
