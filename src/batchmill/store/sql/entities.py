"""Entities: written under the keys that a batch's rows refer to, and read back."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from batchmill.store.batch import EntityRow
from batchmill.store.results import EntityName, EntityPage, StoredEntity
from batchmill.store.sql.session import (
    MAX_ROWS,
    Condition,
    Row,
    Session,
    Upsert,
    chunks,
    rows_in,
)

EntityId: TypeAlias = tuple[str, str]
"""Kind and id."""

CACHE_SIZE = 200_000
"""How many entities are cached."""
PAGE = 10_000
"""How many names are read at a time."""
MAX_TEXT_BYTES = 2_000
"""How many bytes of an id, a name or a layer are kept: PostgreSQL indexes no more than 2,704."""
NO_KEY = -1
"""Instead of the key of an entity that is left out."""
_COLUMNS = "key, kind, id, name, roles"


@dataclass(frozen=True, slots=True)
class KnownEntity:
    """An entity as the store has it, or had it a moment ago."""

    key: int
    name: str
    roles: str
    layers: frozenset[str]
    day: int = 0
    """The last day that it was seen on."""

    def covers(self, other: KnownEntity) -> bool:
        """Whether writing ``other`` would change nothing."""
        return (
            other.name <= self.name
            and other.roles <= self.roles
            and other.layers <= self.layers
            and other.day <= self.day
        )

    def matches(self, row: EntityRow, roles: str, day: int) -> bool:
        """Whether a row of a batch has nothing new; False may be wrong."""
        return (
            self.day >= day
            and row.name == self.name
            and roles == self.roles
            and row.layers <= self.layers
        )

    def merge(self, other: KnownEntity) -> KnownEntity:
        """Both together, under this key; of two texts the greater is kept."""
        return KnownEntity(
            self.key,
            max(self.name, other.name),
            max(self.roles, other.roles),
            self.layers | other.layers,
            max(self.day, other.day),
        )


class EntityCache:
    """Caches the entities used last; only what was committed is added.

    An entity that was last seen before the days that are kept is removed from the store, maybe by
    another process. So a cached entity is valid only while its last day is kept.
    """

    def __init__(self, size: int = CACHE_SIZE) -> None:
        self._size = size
        self._known: OrderedDict[EntityId, KnownEntity] = OrderedDict()
        self._turns = 0

    def enter(self, turns: int) -> None:
        """Forget all if the first day that is kept went back since; ``turns``: how often it did.

        Entities may have been removed whose last day is now after it.
        """
        if turns != self._turns:
            self._known.clear()
            self._turns = turns

    def get(self, entity: EntityId, since: int = 0) -> KnownEntity | None:
        """A cached entity, if it was seen on the day ``since`` or later."""
        known = self._known.get(entity)
        if known is None:
            return None
        if known.day < since:
            del self._known[entity]
            return None
        self._known.move_to_end(entity)
        return known

    def __contains__(self, entity: EntityId) -> bool:
        return entity in self._known

    def add(self, entities: Mapping[EntityId, KnownEntity]) -> None:
        """Add entities that were committed."""
        for entity, known in entities.items():
            self._known[entity] = known
            self._known.move_to_end(entity)
        while len(self._known) > self._size:
            self._known.popitem(last=False)


@dataclass(frozen=True, slots=True)
class EntityKeys:
    """The entities of a batch as they are stored."""

    keys: list[int]
    """The key of each row's entity, or :data:`NO_KEY`."""
    known: dict[EntityId, KnownEntity]
    """What to add to the cache after the commit."""


def store_entities(
    session: Session,
    rows: Iterable[EntityRow],
    days: Iterable[int],
    cache: EntityCache,
    *,
    cutoff: int,
    since: int,
) -> EntityKeys:
    """Write the entities of a batch, as far as they are new or changed.

    Of two texts for one entity the greater is kept, and layers add up: the order of batches makes
    no difference. ``days`` are the last that each is seen on: one before ``cutoff`` is left out.
    Cached entities last seen before ``since`` may have been removed.
    """
    ids: list[EntityId | None] = []
    mentioned: dict[EntityId, KnownEntity] = {}
    known: dict[EntityId, KnownEntity] = {}
    for row, day in zip(rows, days, strict=True):
        if day < cutoff:
            ids.append(None)
            continue
        entity = (row.kind, fit_text(row.id))
        ids.append(entity)
        roles = roles_text(tuple(sorted(row.roles.items()))) if row.roles else "{}"
        old = cache.get(entity, since)
        if old is not None and old.matches(row, roles, day):  # as nearly always
            known[entity] = old
            continue
        layers = _fit_layers(row.layers)
        new = KnownEntity(0, fit_text(replace_nul(row.name)), roles, layers, day)
        before = mentioned.get(entity)
        mentioned[entity] = before.merge(new) if before else new
    changed: dict[EntityId, KnownEntity] = {}
    for entity, new in mentioned.items():
        old = cache.get(entity, since)
        if old and old.covers(new):
            known[entity] = old
        else:
            changed[entity] = new
    written = _write(session, changed, cache) if changed else {}
    known |= written
    keys = [NO_KEY if entity is None else known[entity].key for entity in ids]
    return EntityKeys(keys, written)


def find_unknown(session: Session, kind: str, ids: Iterable[str]) -> set[str]:
    """Which ids of a kind are those of no entity."""
    stored: dict[str, list[str]] = {}
    for id_ in ids:
        stored.setdefault(fit_text(id_), []).append(id_)
    for chunk in chunks(sorted(stored)):
        condition = Condition("kind = ?", (kind,)) & Condition.one_of("id", chunk)
        for (id_,) in session.rows(
            f"SELECT id FROM entity WHERE {condition.sql}", condition.params
        ):
            del stored[id_]
    return {id_ for same in stored.values() for id_ in same}


def count_entities(session: Session) -> dict[str, int]:
    """How many entities of each kind there are."""
    return dict(session.rows("SELECT kind, count(*) FROM entity GROUP BY kind"))


@lru_cache(maxsize=4096)
def roles_text(roles: tuple[tuple[str, str], ...]) -> str:
    """Roles as they are stored."""
    return json.dumps(dict(roles), separators=(",", ":"))


def replace_nul(text: str) -> str:
    """A text without NUL characters, which PostgreSQL cannot hold."""
    return text.replace("\0", "\ufffd") if "\0" in text else text


def fit_text(text: str) -> str:
    """A text as it can be stored and indexed; different texts stay different.

    Without NUL characters and no longer than :data:`MAX_TEXT_BYTES`: where that changes the text, a
    hash of the whole is appended.
    """
    if len(text) <= MAX_TEXT_BYTES // 4 and "\0" not in text:  # as nearly always
        return text
    whole = text.encode("utf-8", "surrogatepass")
    if len(whole) <= MAX_TEXT_BYTES and "\0" not in text:
        return text
    mark = "~" + hashlib.sha256(whole).hexdigest()[:32]
    kept = replace_nul(text).encode("utf-8", "replace")[: MAX_TEXT_BYTES - len(mark)]
    return kept.decode("utf-8", "ignore") + mark


@lru_cache(maxsize=1024)
def _fit_layers(layers: frozenset[str]) -> frozenset[str]:
    """Layers as they are stored; the many entities with the same ones share an object."""
    return frozenset(map(fit_text, layers))


def _write(
    session: Session, changed: Mapping[EntityId, KnownEntity], cache: EntityCache
) -> dict[EntityId, KnownEntity]:
    dialect = session.dialect
    text, whole = dialect.text, dialect.whole
    # In one order in every process, so that two writers cannot wait for each other.
    order = sorted(changed)
    ids = [id_ for _, id_ in order]
    values = {"name": text, "roles": text, "last_day": whole}
    greatest = {name: dialect.greatest(f"kept.{name}", f"excluded.{name}") for name in values}
    rows = session.upsert_reading(
        Upsert.merging("entity", {"kind": text, "id": text}, values, greatest),
        (
            [kind for kind, _ in order],
            ids,
            [changed[entity].name for entity in order],
            [changed[entity].roles for entity in order],
            [changed[entity].day for entity in order],
        ),
        ("key", "kind", "id"),
        " OR ".join(f"excluded.{name} > kept.{name}" for name in values),
    )
    keys = {(kind, id_): key for key, kind, id_ in rows}
    pairs = sorted((keys[entity], layer) for entity in order for layer in changed[entity].layers)
    if pairs:
        layers = Upsert.merging("entity_layer", {"entity": whole, "layer": text}, {}, {})
        session.upsert(layers, ([key for key, _ in pairs], [layer for _, layer in pairs]))
    written = {}
    for entity, new in changed.items():
        stored = KnownEntity(keys[entity], new.name, new.roles, new.layers, new.day)
        old = cache.get(entity)
        # Under another key it is another row: the old one was removed, and its layers with it.
        written[entity] = stored.merge(old) if old and old.key == stored.key else stored
    return written


def of_kind(kind: str | None, layer: str | None) -> Condition:
    """The condition for entities of a kind and of a layer."""
    condition = Condition()
    if kind is not None:
        condition &= Condition("kind = ?", (kind,))
    if layer is not None:
        condition &= in_layer("key", layer)
    return condition


def in_layer(key: str, layer: str) -> Condition:
    """The condition that the entity with a key is in a layer."""
    return Condition(
        f"{key} IN (SELECT entity FROM entity_layer WHERE layer = ?)", (fit_text(layer),)
    )


def id_or_name(text: str) -> Condition:
    """The condition for entities with that id or name."""
    return Condition("(id = ? OR name = ?)", (fit_text(text), fit_text(replace_nul(text))))


def read_layers(session: Session, keys: Iterable[int]) -> dict[int, frozenset[str]]:
    """The layers of entities, by key."""
    layers: dict[int, set[str]] = {}
    query = "SELECT entity, layer FROM entity_layer"
    for key, layer in rows_in(session, query, "entity", dict.fromkeys(keys)):
        layers.setdefault(key, set()).add(layer)
    return {key: frozenset(names) for key, names in layers.items()}


def read_names(session: Session, keys: Iterable[int]) -> dict[int, EntityName]:
    """Kind, id and name of entities, by key; keys without an entity are left out."""
    return {row[0]: EntityName(*row[:4]) for row in _rows_of(session, keys)}


def find_names(
    session: Session, condition: Condition, ids: Collection[str] | None, limit: int
) -> list[EntityName]:
    """Entities under a condition, those with some ids or all, by kind and id."""
    conditions = [condition]
    if ids is not None:
        conditions = [condition & Condition.one_of("id", chunk) for chunk in chunks(ids)]
    entities: list[EntityName] = []
    for where in conditions:
        rows = session.rows(
            f"SELECT key, kind, id, name FROM entity WHERE {where.sql} ORDER BY kind, id LIMIT ?",
            [*where.params, limit],
        )
        entities += [EntityName(*row) for row in rows]
    return entities[:limit]


def read_entities(
    session: Session,
    condition: Condition,
    name_like: str | None,
    *,
    limit: int = MAX_ROWS,
    offset: int = 0,
) -> EntityPage:
    """Some of the entities under a condition, by kind and id; ``name_like`` is part of the name."""
    if name_like:
        everything = sorted(
            _rows_of(session, keys_like(session, condition, name_like)),
            key=lambda row: (row[1].encode(), row[2].encode()),  # as the databases compare text
        )
        total, rows = len(everything), everything[offset : offset + limit]
    else:
        ((total,),) = session.rows(
            f"SELECT count(*) FROM entity WHERE {condition.sql}", condition.params
        )
        rows = session.rows(
            f"SELECT {_COLUMNS} FROM entity WHERE {condition.sql} "
            "ORDER BY kind, id LIMIT ? OFFSET ?",
            [*condition.params, limit, offset],
        )
    layers = read_layers(session, (row[0] for row in rows))
    entities = [
        StoredEntity(kind, id_, name, layers.get(key, frozenset()), json.loads(roles))
        for key, kind, id_, name, roles in rows
    ]
    return EntityPage(entities, int(total))


def keys_like(session: Session, condition: Condition, name_like: str) -> list[int]:
    """The keys of entities by part of their name, ignoring case.

    Compared here: the databases know the case of ASCII letters only. No index helps with the middle
    of a name, so all names are read anyway.
    """
    part = name_like.casefold()
    keys: list[int] = []
    last: int | None = None
    while True:
        rest = condition if last is None else condition & Condition("key > ?", (last,))
        page = session.rows(
            f"SELECT key, name FROM entity WHERE {rest.sql} ORDER BY key LIMIT ?",
            [*rest.params, PAGE],
        )
        keys += [key for key, name in page if part in name.casefold()]
        if len(page) < PAGE:
            return keys
        last = page[-1][0]


def _rows_of(session: Session, keys: Iterable[int]) -> Iterator[Row]:
    return rows_in(session, f"SELECT {_COLUMNS} FROM entity", "key", keys)
