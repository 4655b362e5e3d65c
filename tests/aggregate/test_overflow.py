"""Tests of the limit of new entities."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

pytest.importorskip("pyarrow")

from batchmill.aggregate import (
    Aggregator,
    EntityAccount,
    EntityBook,
    EntityBudget,
    EntityLimiter,
    Offender,
    Overflow,
    contribution,
    worst,
)
from batchmill.oal import load
from batchmill.sources import SourceType, builtin_catalog, entity_id, service_id
from batchmill.store import Layout
from tests.kit.pipelines import START
from tests.oracle.generate import to_table

ENDPOINT = builtin_catalog().source("Endpoint")
SERVICE = builtin_catalog().source("Service")
RELATION = builtin_catalog().source("ServiceRelation")
CALL = builtin_catalog().source("EndpointRelation")
Names = tuple[str | None, ...]


class Known:
    """The entities of a store, and how often they were looked up."""

    def __init__(self, *ids: str) -> None:
        self.ids = set(ids)
        self.queries = 0

    def __call__(self, kind: str, ids: Iterable[str], few: int) -> set[str]:
        ids = set(ids)
        if len(ids) <= few:
            return ids
        self.queries += 1
        return ids - self.ids


def named(source: SourceType, **roles: str) -> Names:
    """The names of an entity, in the order of its roles; layers are GENERAL."""
    wanted = [role for role, name in source.entity.roles.items() if not name.startswith("=")]
    return tuple(roles.get(role, "GENERAL") for role in wanted)


def id_of(source: SourceType, names: Names) -> str:
    """The id of the entity with these names."""
    fields = [name for name in source.entity.roles.values() if not name.startswith("=")]
    return entity_id(source, dict(zip(fields, names, strict=True)))


def endpoints(service: str, names: Iterable[str]) -> list[Names]:
    """Endpoints of a service."""
    return [named(ENDPOINT, service=service, name=name) for name in names]


def limited(
    source: SourceType,
    names: Sequence[Names],
    budget: EntityBudget,
    known: Known | None = None,
    rows: Mapping[int, int] | None = None,
) -> tuple[list[Names], EntityLimiter]:
    """The names after a limit, and the limiter; ``rows`` says which have more than one."""
    limiter = EntityLimiter(budget, known or Known())
    ids = [id_of(source, own) for own in names]
    counts = [(rows or {}).get(place, 1) for place in range(len(names))]
    other = limiter.replacements(source, names, ids, counts)
    return [other.get(place, own) for place, own in enumerate(names)], limiter


MANY = endpoints("shop", [f"/{n:02}" for n in range(50)])


def test_below_the_limit_nothing_changes_and_nothing_is_looked_up() -> None:
    """A quarter of the limit is admitted without a query."""
    known = Known()
    after, limiter = limited(ENDPOINT, MANY[:2], EntityBudget(8), known)
    assert after == MANY[:2]
    assert known.queries == 0
    assert limiter.overflow.admitted == {"Endpoint": 2}
    assert not limiter.overflow.rows


def test_known_entities_keep_their_names_however_many_there_are() -> None:
    """The limit is of new entities: a large shop's old ones are not counted."""
    known = Known(*(id_of(ENDPOINT, own) for own in MANY))
    after, limiter = limited(ENDPOINT, MANY, EntityBudget(3), known)
    assert after == MANY
    assert limiter.overflow.admitted["Endpoint"] == 0


def test_endpoints_over_the_limit_go_under_the_overflow_of_their_service() -> None:
    """Of 20 places, two are kept for overflow entities."""
    after, limiter = limited(ENDPOINT, MANY, EntityBudget(20))
    (overflow,) = endpoints("shop", ["overflow"])
    assert after.count(overflow) == 50 - 18
    assert len(set(after)) == 19
    assert limiter.overflow.rows == {"Endpoint": 32}
    assert limiter.overflow.admitted == {"Endpoint": 19}


def test_one_service_cannot_take_the_places_of_another() -> None:
    """Parents take turns: three new endpoints of a quiet service get their names."""
    quiet = endpoints("quiet", ["/x", "/y", "/z"])
    after, limiter = limited(ENDPOINT, [*MANY, *quiet], EntityBudget(20))
    assert after[-3:] == quiet
    assert [offender.parent for offender in limiter.overflow.offenders] == ["endpoints of shop"]


def test_the_busiest_get_their_names_first() -> None:
    """Of one parent, those with the most rows are named."""
    after, _ = limited(ENDPOINT, MANY, EntityBudget(2), rows={17: 100})
    assert after[17] == MANY[17]


def test_parents_without_end_have_one_overflow_together() -> None:
    """200 services with an endpoint each: no more than 20 new entities, and the last resort."""
    names = [own for n in range(200) for own in endpoints(f"s{n:03}", ["/"])]
    after, _ = limited(ENDPOINT, names, EntityBudget(20))
    assert len(set(after)) <= 21
    assert after.count(*endpoints("overflow", ["overflow"])) >= 200 - 20


def test_services_over_the_limit_are_one_service() -> None:
    """There is no parent: one service named overflow."""
    names = [named(SERVICE, service=f"s{n:03}") for n in range(100)]
    after, limiter = limited(SERVICE, names, EntityBudget(10))
    assert after.count(named(SERVICE, service="overflow")) == 90
    assert len(set(after)) == 11
    (offender,) = limiter.overflow.offenders
    assert (offender.parent, offender.names, offender.rows) == ("services", 90, 90)


@pytest.mark.parametrize(
    ("hub", "other", "parent"),
    [
        ("source_service", "dest_service", "calls from hub"),
        ("dest_service", "source_service", "calls to hub"),
    ],
)
def test_a_relation_keeps_the_end_that_has_many(hub: str, other: str, parent: str) -> None:
    """Calls from one service to thousands go from it to overflow, and the other way round."""
    names = [named(RELATION, **{hub: "hub", other: f"s{n:02}"}) for n in range(50)]
    after, limiter = limited(RELATION, names, EntityBudget(10))
    assert after.count(named(RELATION, **{hub: "hub", other: "overflow"})) == 41
    (offender,) = limiter.overflow.offenders
    assert offender.parent == parent
    assert offender.example.startswith("s")


def test_a_relation_of_endpoints_keeps_both_services() -> None:
    """Both endpoints are overflow, of the two services."""
    ends = {"source_service": "a", "dest_service": "b", "dest_name": "/x"}
    names = [named(CALL, **ends, source_name=f"/{n}") for n in range(50)]
    after, _ = limited(CALL, names, EntityBudget(10))
    ends |= {"source_name": "overflow", "dest_name": "overflow"}
    assert after.count(named(CALL, **ends)) == 41


def test_the_same_batch_gives_the_same_choice() -> None:
    """Whatever order the entities come in."""
    one, _ = limited(ENDPOINT, MANY, EntityBudget(20))
    two, _ = limited(ENDPOINT, MANY[::-1], EntityBudget(20))
    assert one == two[::-1]


def test_a_committed_part_that_runs_again_gets_the_names_that_the_store_has() -> None:
    """With nothing left, what the store knows keeps its name, and the rest is overflow."""
    first, _ = limited(ENDPOINT, MANY, EntityBudget(20))
    known = Known(*(id_of(ENDPOINT, own) for own in first))
    again, limiter = limited(ENDPOINT, MANY, EntityBudget(20, own=()), known)
    assert again == first
    assert limiter.overflow.rows == {"Endpoint": 32}


def test_parts_have_the_limit_together() -> None:
    """No part of the limit is lost, or there twice, whatever the number of parts."""
    for limit in (0, 3, 16, 10_000):
        for turn in (0, 5):
            shares = [
                EntityBudget(limit, {"x": 1}, parts=16, own=(part,), turn=turn)
                for part in range(16)
            ]
            assert sum(share.left("Endpoint") for share in shares) == limit
            assert sum(share.left("x") for share in shares) == max(0, limit - 1)


def brought(count: int) -> Overflow:
    """New endpoints that got their names."""
    return Overflow(Counter(Endpoint=count), Counter(endpoint=count))


def test_an_account_is_of_one_minute() -> None:
    """What was used counts until the minute is over."""
    account = EntityAccount(10)
    account.add(brought(4))
    lefts = []
    for now in (600.0, 659.9, 660.0):
        budget = account.budget(now)
        assert budget is not None
        lefts.append(budget.left("Endpoint"))
        account.add(brought(4))
    assert lefts == [10, 6, 10]


def test_an_account_counts_what_the_store_has() -> None:
    """Once a minute, and only if there was something new, or while there is no room."""
    counts = iter([{"endpoint": 90}, {"endpoint": 98}, {"endpoint": 100}, {"endpoint": 50}])
    account = EntityAccount(0, 100, lambda: next(counts))
    rooms = []
    for now, new in ((0, 6), (1, 0), (60, 0), (120, 0), (121, 2), (180, 0), (240, 0), (300, 0)):
        budget = account.budget(now)
        assert budget is not None
        rooms.append(budget.room("endpoint"))
        account.add(brought(new))
    assert rooms == [10, 4, 2, 2, 2, 0, 50, 50]


def test_a_full_store_takes_overflow_entities_only() -> None:
    """They may be a tenth more; rows that go under them have a reason of their own."""
    budget = EntityBudget(1_000, most=60, stored={"endpoint": 55})
    after, limiter = limited(ENDPOINT, MANY, budget)
    (overflow,) = endpoints("shop", ["overflow"])
    assert after.count(overflow) == 45
    assert limiter.overflow.counters() == {
        ("overflow", "Endpoint", "too many entities in the store"): 45
    }
    budget = EntityBudget(1_000, most=60, stored={"endpoint": 66})
    after, _ = limited(ENDPOINT, MANY, budget)
    assert set(after) == {named(ENDPOINT, service="overflow", name="overflow")}


def test_an_account_without_a_limit_gives_no_budget() -> None:
    """0 switches the limit off."""
    assert EntityAccount(0).budget(0.0) is None


def test_a_book_merges_what_is_over_the_limit() -> None:
    """The rows of all of them are in the overflow entity's cells: none is lost."""
    limiter = EntityLimiter(EntityBudget(10), Known())
    book = EntityBook(limiter)
    row = {"time": START, "serviceName": "shop", "serviceLayer": "GENERAL", "latency": 1}
    rows = [row | {"name": f"/{n:02}"} for n in range(50)]
    aggregator = Aggregator(ENDPOINT, load("m = from(Endpoint.*).count();"))
    deltas = aggregator.make(to_table("Endpoint", rows)).deltas
    made = contribution(deltas, aggregator, Layout({"m": ("m",)}), book)
    assert made.rows == 50
    minutes: Any = made.deltas[0]
    (cells,) = (column.to_pylist() for column in minutes.cells.values())
    assert sum(cells) == 50
    names = [book.rows()[number].name for number in minutes.entities.to_pylist()]
    assert cells[names.index("overflow")] == 41
    assert len(names) == 10


def test_services_of_statements_are_limited_too() -> None:
    """Databases that are too many go under overflow, with the same layer."""
    limiter = EntityLimiter(EntityBudget(2), Known())
    book = EntityBook(limiter)
    ids = [service_id(f"db{n}", False) for n in range(5)]
    book.limit_services(("top", id_) for id_ in [*ids, *ids[:2]])
    for id_ in ids:
        book.service_number("top", id_, {"VIRTUAL_DATABASE"})
    assert sorted(entity.name for entity in book.rows()) == ["db0", "db1", "overflow"]
    assert limiter.overflow.counters() == {
        ("overflow", "top", "too many new entities in a minute"): 3
    }


def test_the_worst_offenders_are_few() -> None:
    """A parent is named once, those with the most rows first."""
    noted = [Offender("Endpoint", f"endpoints of s{n % 20}", 1, n, "/x") for n in range(100)]
    listed = worst(noted)
    assert len(listed) == 10
    assert listed[0] == Offender("Endpoint", "endpoints of s19", 5, 19 + 39 + 59 + 79 + 99, "/x")
