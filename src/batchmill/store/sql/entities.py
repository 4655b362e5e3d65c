"""Entities: from what a batch names to the keys that its rows are kept under."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from batchmill.store.sql.session import Session, Statement
from batchmill.store.types import EntityRow

EntityId: TypeAlias = tuple[str, str]
"""Kind and id."""

CHUNK = 500
"""How many ids one query asks for."""
CACHED = 200_000
"""How many entities are remembered."""
LONGEST = 2_000
"""How many bytes of an id, a name or a layer are kept: PostgreSQL indexes no more than 2,704."""
NO_KEY = -1
"""In place of the key of an entity that is left out."""


@dataclass(frozen=True, slots=True)
class Known:
    """What the store holds of an entity, at least."""

    key: int
    name: str
    roles: str
    layers: frozenset[str]
    day: int = 0
    """The last day that it was seen on."""


class EntityCache:
    """Remembers the entities used last; only what was committed goes in.

    An entity that was last seen before the days that are kept is removed from the store, be it by
    another process. So what is remembered holds only while its day is one of those.
    """

    def __init__(self, most: int = CACHED) -> None:
        self._most = most
        self._known: OrderedDict[EntityId, Known] = OrderedDict()

    def get(self, entity: EntityId, since: int = 0) -> Known | None:
        """What is remembered of an entity, if that was seen on the day ``since`` or later."""
        known = self._known.get(entity)
        if known is None:
            return None
        if known.day < since:
            del self._known[entity]
            return None
        self._known.move_to_end(entity)
        return known

    def add(self, entities: Mapping[EntityId, Known]) -> None:
        """Remember entities that are in the store for good."""
        for entity, known in entities.items():
            self._known[entity] = known
            self._known.move_to_end(entity)
        while len(self._known) > self._most:
            self._known.popitem(last=False)

    def clear(self) -> None:
        """Forget everything."""
        self._known.clear()


def store_entities(
    session: Session,
    rows: Iterable[EntityRow],
    days: Iterable[int],
    cache: EntityCache,
    *,
    cutoff: int,
    since: int,
) -> tuple[list[int], dict[EntityId, Known]]:
    """The key of each row's entity, and what to remember once the transaction is through.

    Of two texts for one entity the greater is kept, and layers add up: the order in which batches
    come makes no difference. ``days`` are the last that each is seen on: one before ``cutoff`` is
    left out, and has the key :data:`NO_KEY`. Entities last seen before ``since`` may be gone.
    """
    ids: list[EntityId | None] = []
    named: dict[EntityId, Known] = {}
    for row, day in zip(rows, days, strict=True):
        if day < cutoff:
            ids.append(None)
            continue
        entity = (row.kind, fitted(row.id))
        ids.append(entity)
        before = named.get(entity)
        roles = json.dumps(dict(sorted(row.roles.items())), separators=(",", ":"))
        name = fitted(clean(row.name))
        layers = frozenset(map(fitted, row.layers))
        if before:
            name, roles = max(name, before.name), max(roles, before.roles)
            layers, day = layers | before.layers, max(day, before.day)
        named[entity] = Known(0, name, roles, layers, day)
    news: dict[EntityId, Known] = {}
    found: dict[EntityId, Known] = {}
    for entity, new in named.items():
        old = cache.get(entity, since)
        if old and _adds_nothing(new, old):
            found[entity] = old
        else:
            news[entity] = new
    if news:
        found.update(_write(session, news, cache))
    return [NO_KEY if entity is None else found[entity].key for entity in ids], found


def clean(text: str) -> str:
    """A text without NUL characters, which PostgreSQL cannot hold."""
    return text.replace("\0", "\ufffd") if "\0" in text else text


def fitted(text: str) -> str:
    """A text as it can be kept and indexed; different ones stay different.

    Without NUL characters and no longer than :data:`LONGEST`: where that changes it, a hash of the
    whole follows.
    """
    if len(text) <= LONGEST // 4 and "\0" not in text:  # as nearly always
        return text
    whole = text.encode("utf-8", "surrogatepass")
    if len(whole) <= LONGEST and "\0" not in text:
        return text
    mark = "~" + hashlib.sha256(whole).hexdigest()[:32]
    kept = clean(text).encode("utf-8", "replace")[: LONGEST - len(mark)]
    return kept.decode("utf-8", "ignore") + mark


def _adds_nothing(new: Known, old: Known) -> bool:
    return (
        new.name <= old.name
        and new.roles <= old.roles
        and new.layers <= old.layers
        and new.day <= old.day
    )


def _write(
    session: Session, news: Mapping[EntityId, Known], cache: EntityCache
) -> dict[EntityId, Known]:
    dialect = session.dialect
    # In one order in every process, so that two writers cannot wait for each other.
    order = sorted(news)
    updates = ", ".join(
        f"{name} = {dialect.greatest(f'kept.{name}', f'excluded.{name}')}"
        for name in ("name", "roles", "last_day")
    )
    statement = Statement(
        "entity",
        ("kind", "id", "name", "roles", "last_day"),
        (*(dialect.text,) * 4, dialect.whole),
        ("kind", "id"),
        f"ON CONFLICT (kind, id) DO UPDATE SET {updates}",
    )
    session.upsert(
        statement,
        (
            [kind for kind, _ in order],
            [id_ for _, id_ in order],
            [news[entity].name for entity in order],
            [news[entity].roles for entity in order],
            [news[entity].day for entity in order],
        ),
    )
    keys = _keys(session, order)
    pairs = sorted((keys[entity], layer) for entity in order for layer in news[entity].layers)
    layers = Statement(
        "entity_layer",
        ("entity", "layer"),
        (dialect.whole, dialect.text),
        ("entity", "layer"),
        "ON CONFLICT (entity, layer) DO NOTHING",
    )
    if pairs:
        session.upsert(layers, ([key for key, _ in pairs], [layer for _, layer in pairs]))
    written = {}
    for entity, new in news.items():
        old = cache.get(entity)
        written[entity] = Known(
            keys[entity],
            max(new.name, old.name) if old else new.name,
            max(new.roles, old.roles) if old else new.roles,
            new.layers | old.layers if old else new.layers,
            max(new.day, old.day) if old else new.day,
        )
    return written


def _keys(session: Session, entities: list[EntityId]) -> dict[EntityId, int]:
    keys: dict[EntityId, int] = {}
    for start in range(0, len(entities), CHUNK):
        ids = [id_ for _, id_ in entities[start : start + CHUNK]]
        marks = ", ".join("?" * len(ids))
        for kind, id_, key in session.rows(
            f"SELECT kind, id, key FROM entity WHERE id IN ({marks})", ids
        ):
            keys[kind, id_] = key
    return keys
