"""Limits how many new entities of an event type one minute may bring, and how many a store has.

An entity is new if the store does not have it. Of more new entities than the limit, some get their
own name: the parents take turns, and of one parent the busiest come first. The others are counted
under an entity that is called ``overflow``:

==================  ====================================  ================================
kind                under its parent                      where parents are too many, too
==================  ====================================  ================================
service, given id                                         ``overflow``
instance, endpoint  ``overflow`` of the same service      ``overflow`` of ``overflow``
service relation    ``overflow`` for one end: the other   ``overflow`` to ``overflow``
                    is the one with more such relations
other relations     ``overflow`` of both services         ``overflow`` for all four names
==================  ====================================  ================================

An overflow entity of a parent is a new entity as well, and takes a place of the limit: a tenth is
kept for them. So no minute brings more than the limit, but for the few of the last column.

A store that has the most entities of a kind takes no new ones of it, but for overflow entities,
which may be a tenth of that more.

What is chosen depends on the rows of a batch, on what the store has, and on the minute's account
only. It is no part of the exactly-once commit: whatever a try chooses, its rows are counted once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

from batchmill.sources import (
    EntityKind,
    SourceType,
    entity_id,
    service_id,
    split_entity_id,
)

OVERFLOW = "overflow"
"""The name of such entities, and the store's counter of rows that went under them."""
TOO_MANY = "too many new entities in a minute"
"""Counter reason: the event type's limit for this minute."""
STORE_FULL = "too many entities in the store"
"""Counter reason: the store's limit for this kind of entity."""
NO_LIMIT = 2**62
MOST_OFFENDERS = 10
"""Of how many parents it is said how much went under their overflow entities."""
_SHOWN = 80
"""Characters of a name that are shown."""
_MINUTE_S = 60

Names: TypeAlias = tuple[str | None, ...]
"""What the roles of an entity are, in the order of its rule, without constants."""
UnknownEntities: TypeAlias = Callable[[str, Iterable[str], int], set[str]]
"""Which ids of a kind a store does not have; see :meth:`batchmill.store.Store.unknown_entities`."""
_Parent: TypeAlias = tuple[str, ...]

_PARENT_ROLES: Mapping[EntityKind, tuple[str, ...]] = {
    "instance": ("service",),
    "endpoint": ("service",),
    "instance_relation": ("source_service", "dest_service"),
    "endpoint_relation": ("source_service", "dest_service"),
}
_PHRASES: Mapping[EntityKind, str] = {
    "service": "services",
    "given": "entities",
    "instance": "instances of {0}",
    "endpoint": "endpoints of {0}",
    "service_relation": "calls {0} {1}",
    "instance_relation": "calls between instances, from {0} to {1}",
    "endpoint_relation": "calls between endpoints, from {0} to {1}",
}


@dataclass(frozen=True, slots=True)
class EntityBudget:
    """How many new entities a batch, or a task's parts of it, may bring."""

    limit: int
    """For each event type and minute."""
    used: Mapping[str, int] = field(default_factory=dict)
    """How many this minute has brought already, by event type."""
    parts: int = 1
    """Into how many parts the batch is divided; what is left is divided among them."""
    own: tuple[int, ...] = (0,)
    """Which of them these are."""
    turn: int = 0
    """Changes from batch to batch, and with it which parts get one more than the others."""
    most: int = NO_LIMIT
    """How many entities of each kind the store may have."""
    stored: Mapping[str, int] = field(default_factory=dict)
    """How many it has, by kind."""

    def left(self, source: str) -> int:
        """How many new entities of an event type this minute may bring."""
        return self._share(self.limit - self.used.get(source, 0))

    def room(self, kind: str, *, overflow: bool = False) -> int:
        """How many more entities of a kind the store may have; more of overflow entities."""
        most = self.most + (-(-self.most // 10) if overflow else 0)
        return self._share(most - self.stored.get(kind, 0))

    def _share(self, left: int) -> int:
        least, rest = divmod(max(0, left), self.parts)
        return sum(least + ((part + self.turn) % self.parts < rest) for part in self.own)


class EntityAccount:
    """Counts the new entities of the running minute, for a writer that commits batches."""

    def __init__(
        self, limit: int, most: int = 0, count: Callable[[], Mapping[str, int]] = dict
    ) -> None:
        """``most`` is how many entities of a kind the store may have, and ``count`` says how many
        it has. 0: there is no such limit."""
        self._limit = limit
        self._most = most
        self._count = count
        self._minute = -1
        self._used: Counter[str] = Counter()
        self._stored: Mapping[str, int] | None = None
        self._brought: Counter[str] = Counter()
        """By kind, since they were counted in the store."""

    def budget(self, now: float, turn: int = 0) -> EntityBudget | None:
        """What a batch that is made at that time, in seconds since 1970, may bring; None: all."""
        if not self._limit and not self._most:
            return None
        minute = int(now // _MINUTE_S)
        if minute != self._minute:
            self._minute, self._used = minute, Counter()
            if self._stored is not None and (
                self._brought.total() or max(self._stored.values(), default=0) >= self._most
            ):
                self._stored = None
        limit, used = self._limit or NO_LIMIT, dict(self._used)
        if not self._most:
            return EntityBudget(limit, used, turn=turn)
        if self._stored is None:
            self._stored, self._brought = self._count(), Counter()
        stored = Counter(self._stored) + self._brought
        return EntityBudget(limit, used, turn=turn, most=self._most, stored=dict(stored))

    def add(self, overflow: Overflow) -> None:
        """Count new entities that a batch has brought."""
        self._used.update(overflow.admitted)
        self._brought.update(overflow.admitted_kinds)


@dataclass(frozen=True, slots=True)
class Offender:
    """A parent of which entities went under ``overflow``."""

    source: str
    parent: str
    """In words, such as ``endpoints of shop``."""
    names: int
    """How many entities, of each batch; one that comes again counts again."""
    rows: int
    example: str
    """The name of one of them."""

    def __add__(self, other: Offender) -> Offender:
        names, rows = self.names + other.names, self.rows + other.rows
        return Offender(self.source, self.parent, names, rows, other.example)

    def as_json(self) -> dict[str, Any]:
        """For reports."""
        return asdict(self)


@dataclass
class Overflow:
    """Counts of new entities that were admitted or went to overflow, and the worst parents."""

    admitted: Counter[str] = field(default_factory=Counter)
    """New entities that got their own name, by event type; with a few that were not looked up, and
    may have been known."""
    admitted_kinds: Counter[str] = field(default_factory=Counter)
    """The same by kind of entity."""
    rows: Counter[str] = field(default_factory=Counter)
    """Rows that went under overflow entities, by event type."""
    full_rows: Counter[str] = field(default_factory=Counter)
    """Those of them that did because the store has the most entities."""
    offenders: list[Offender] = field(default_factory=list)

    def add(self, other: Overflow) -> None:
        """Add what other limits have done."""
        for name in ("admitted", "admitted_kinds", "rows", "full_rows"):
            getattr(self, name).update(getattr(other, name))
        self.offenders = worst([*self.offenders, *other.offenders])

    def counters(self) -> dict[tuple[str, str, str], int]:
        """The store's counters."""
        in_a_minute = self.rows - self.full_rows
        counters = {(OVERFLOW, source, TOO_MANY): rows for source, rows in in_a_minute.items()}
        full = {(OVERFLOW, source, STORE_FULL): rows for source, rows in self.full_rows.items()}
        return counters | full


def worst(offenders: Iterable[Offender], most: int = MOST_OFFENDERS) -> list[Offender]:
    """Those with the most rows, each parent once."""
    summed: dict[tuple[str, str], Offender] = {}
    for offender in offenders:
        key = (offender.source, offender.parent)
        summed[key] = summed[key] + offender if key in summed else offender
    return sorted(summed.values(), key=lambda one: (-one.rows, one.source, one.parent))[:most]


class EntityLimiter:
    """Applies a budget to the entities of a batch, one event type after the other."""

    def __init__(self, budget: EntityBudget, unknown: UnknownEntities) -> None:
        self._budget = budget
        self._unknown = unknown
        self._admitted: defaultdict[str, set[str]] = defaultdict(set)
        """New entities by kind: event types may share them."""
        self.overflow = Overflow()
        """What was done so far."""

    def replacements(
        self, source: SourceType, names: Sequence[Names], ids: Sequence[str], rows: Sequence[int]
    ) -> dict[int, Names]:
        """Other names for the entities that are over the limit, by their place in ``names``.

        ``ids`` are those of the entities, ``rows`` how many rows each has. The same id may be there
        more than once.
        """
        left, full = self._left(source.name, source.entity.kind)
        new = self._new(source.entity.kind, ids, left)
        if len(new) <= left:
            self._admit(source.name, source.entity.kind, new)
            return {}
        weights: Counter[str] = Counter()
        first: dict[str, Names] = {}
        for place, id_ in enumerate(ids):
            if id_ in new:
                weights[id_] += rows[place]
                first.setdefault(id_, names[place])
        kind = _Kind(source)
        parents = kind.parents(first)
        # A store that is full has places of its own for overflow entities.
        kept = left - (-(-left // 10) if kind.has_parents and not full else 0)
        chosen = set(_chosen(parents, weights, max(0, kept)))
        self._admit(source.name, source.entity.kind, chosen)
        refused = new - chosen
        under = self._under_parents(kind, {id_: first[id_] for id_ in refused}, parents, weights)
        self._note(kind, refused, parents, weights, first)
        if full:
            self.overflow.full_rows[source.name] += sum(weights[id_] for id_ in refused)
        return {
            place: under.get(id_) or kind.nowhere(names[place])
            for place, id_ in enumerate(ids)
            if id_ in refused
        }

    def service_replacements(self, stream: str, rows: Mapping[str, int]) -> dict[str, str]:
        """Ids of overflow entities for services of slow statements that are over the limit."""
        left, full = self._left(stream, "service")
        new = self._new("service", rows, left)
        busiest = sorted(new, key=lambda id_: (-rows[id_], id_))[: max(0, left)]
        self._admit(stream, "service", set(busiest))
        refused = new.difference(busiest)
        if refused:
            total = sum(rows[id_] for id_ in refused)
            (example,) = split_entity_id("service", min(refused))
            offender = Offender(stream, "services", len(refused), total, example[:_SHOWN])
            self.overflow.rows[stream] += total
            if full:
                self.overflow.full_rows[stream] += total
            self.overflow.offenders = worst([*self.overflow.offenders, offender])
        return {id_: service_id(OVERFLOW, id_.endswith(".1")) for id_ in refused}

    def _new(self, kind: str, ids: Iterable[str], left: int) -> set[str]:
        """Which ids are new, or may be: few of them are not worth a query."""
        distinct = dict.fromkeys(ids)
        return self._unknown(kind, distinct, max(0, left) // 4) - self._admitted[kind]

    def _left(self, of: str, kind: str, *, overflow: bool = False) -> tuple[int, bool]:
        """How many new entities there may be; whether it is the store that has no room for more."""
        left = self._budget.left(of) - self.overflow.admitted[of]
        room = self._budget.room(kind, overflow=overflow) - self.overflow.admitted_kinds[kind]
        return min(left, room), room < left

    def _admit(self, of: str, kind: str, ids: set[str]) -> None:
        self._admitted[kind] |= ids
        self.overflow.admitted[of] += len(ids)
        self.overflow.admitted_kinds[kind] += len(ids)

    def _under_parents(
        self,
        kind: _Kind,
        refused: Mapping[str, Names],
        parents: Mapping[str, _Parent],
        weights: Mapping[str, int],
    ) -> dict[str, Names]:
        """The names of the overflow entities of parents, as far as there is room for them."""
        if not kind.has_parents:
            return {}
        source = kind.source
        names = {id_: kind.under(own, parents[id_]) for id_, own in refused.items()}
        id_of = {own: kind.id_of(own) for own in set(names.values())}
        ids = {id_: id_of[own] for id_, own in names.items()}
        rows: Counter[str] = Counter()
        for id_, overflow_id in ids.items():
            rows[overflow_id] += weights[id_]
        new = self._unknown(source.entity.kind, list(rows), 0)
        new -= self._admitted[source.entity.kind]
        left, _ = self._left(source.name, source.entity.kind, overflow=True)
        busiest = sorted(new, key=lambda id_: (-rows[id_], id_))[: max(0, left)]
        self._admit(source.name, source.entity.kind, set(busiest))
        nowhere = new.difference(busiest)
        return {id_: own for id_, own in names.items() if ids[id_] not in nowhere}

    def _note(
        self,
        kind: _Kind,
        refused: Iterable[str],
        parents: Mapping[str, _Parent],
        weights: Mapping[str, int],
        first: Mapping[str, Names],
    ) -> None:
        """Count the rows, and remember the worst parents."""
        of = kind.source.name
        counts: Counter[_Parent] = Counter()
        rows: Counter[_Parent] = Counter()
        examples: dict[_Parent, str] = {}
        for id_ in refused:
            parent = parents[id_]
            counts[parent] += 1
            rows[parent] += weights[id_]
            examples[parent] = min(id_, examples.get(parent, id_))
        self.overflow.rows[of] += rows.total()
        listed = sorted(rows, key=lambda parent: (-rows[parent], parent))[:MOST_OFFENDERS]
        offenders = [
            Offender(
                *(of, kind.phrase(parent), counts[parent], rows[parent]),
                kind.own_name(first[examples[parent]], parent),
            )
            for parent in listed
        ]
        self.overflow.offenders = worst([*self.overflow.offenders, *offenders])


def role_fields(source: SourceType) -> list[str]:
    """The fields that name the entity of a row, in the order of its roles."""
    return [name for name in source.entity.roles.values() if not name.startswith("=")]


class _Kind:
    """What is replaced in the names of an event type's entities."""

    def __init__(self, source: SourceType) -> None:
        self.source = source
        self._fields = role_fields(source)
        self._roles = [
            role for role, name in source.entity.roles.items() if not name.startswith("=")
        ]
        self._parent_roles = _PARENT_ROLES.get(source.entity.kind, ())
        self.has_parents = source.entity.kind not in ("service", "given")

    def id_of(self, names: Names) -> str:
        """The id of the entity with these names."""
        return entity_id(self.source, dict(zip(self._fields, names, strict=True)))

    def parents(self, names: Mapping[str, Names]) -> dict[str, _Parent]:
        """The parent of each entity, by its id."""
        if self.source.entity.kind != "service_relation":
            places = [self._roles.index(role) for role in self._parent_roles]
            return {id_: tuple(own[place] or "" for place in places) for id_, own in names.items()}
        # The end with more of these relations: all calls from one service, or all to one.
        caller, callee = map(self._roles.index, ("source_service", "dest_service"))
        calls = Counter(own[caller] for own in names.values())
        served = Counter(own[callee] for own in names.values())
        return {
            id_: ("from", own[caller] or "")
            if calls[own[caller]] >= served[own[callee]]
            else ("to", own[callee] or "")
            for id_, own in names.items()
        }

    def under(self, names: Names, parent: _Parent) -> Names:
        """The names of the overflow entity of a parent."""
        if self.source.entity.kind == "service_relation":
            kept = "source_service" if parent[0] == "from" else "dest_service"
            return self._replaced(names, {"source_service", "dest_service"} - {kept})
        return self._replaced(names, {"name", "source_name", "dest_name"})

    def nowhere(self, names: Names) -> Names:
        """The names of the overflow entity without a parent; layers stay."""
        return self._replaced(names, {role for role in self._roles if not role.endswith("layer")})

    def phrase(self, parent: _Parent) -> str:
        """A parent in words."""
        shown = [name[:_SHOWN] for name in parent]
        return _PHRASES[self.source.entity.kind].format(*shown)

    def own_name(self, names: Names, parent: _Parent) -> str:
        """The name of an entity beside its parent's."""
        kept: list[str] = []
        for role, name in zip(self._roles, names, strict=True):
            if role.endswith("layer") or role in self._parent_roles:
                continue
            if self.source.entity.kind == "service_relation" and name == parent[1]:
                continue
            kept.append((name or "")[:_SHOWN])
        return " to ".join(kept)

    def _replaced(self, names: Names, roles: set[str]) -> Names:
        pairs = zip(self._roles, names, strict=True)
        return tuple(OVERFLOW if role in roles else name for role, name in pairs)


def _chosen(parents: Mapping[str, _Parent], weights: Mapping[str, int], most: int) -> list[str]:
    """Which entities get their own name: of each parent the busiest, then the next of each."""
    ranks: Counter[_Parent] = Counter()
    ranked = []
    for id_ in sorted(parents, key=lambda id_: (-weights[id_], id_)):
        parent = parents[id_]
        ranked.append((ranks[parent], -weights[id_], id_))
        ranks[parent] += 1
    return [id_ for _, _, id_ in sorted(ranked)[:most]]
