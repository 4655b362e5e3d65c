"""Reading a whole bucket: every active metric of every entity in it, one query a source.

For whoever passes on all that there is of a minute. Metric by metric it would take as many queries
as there are metrics, and what is committed in between would show in some of them only.
"""

from __future__ import annotations

from collections.abc import Sequence

from batchmill.sources import Grain
from batchmill.store.cell import Shape
from batchmill.store.sql.merging import quoted, table_name
from batchmill.store.sql.reading import MOST_ROWS, has_value, read_layers
from batchmill.store.sql.register import all_metrics
from batchmill.store.sql.session import Session
from batchmill.store.views import BucketValues, EntityValues, StoredMetric

_MOST_COUNTS = 100
"""How many of a source's counts are added up: databases bound the depth of an expression."""


def read_bucket(session: Session, grain: Grain, bucket: int, most: int | None) -> BucketValues:
    """All values of a bucket; of each source ``most`` entities at most, the busiest."""
    by_source: dict[str, list[StoredMetric]] = {}
    active = [each for each in all_metrics(session) if each.active and each.columns]
    for each in active:
        by_source.setdefault(each.source, []).append(each)
    entities: list[EntityValues] = []
    left_out: dict[str, int] = {}
    for _, metrics in sorted(by_source.items()):
        found, more = _read_source(session, grain, bucket, metrics, most)
        entities += found
        if more:
            left_out |= _left_out(session, grain, bucket, metrics, found)
    return BucketValues(grain, bucket, tuple(active), entities, left_out)


def _read_source(
    session: Session, grain: Grain, bucket: int, metrics: Sequence[StoredMetric], most: int | None
) -> tuple[list[EntityValues], bool]:
    """The entities of one source, the busiest first, and whether there are more of them."""
    source = metrics[0].source
    columns = [column for each in metrics for column in each.columns]
    limit = MOST_ROWS if most is None else min(most + 1, MOST_ROWS)
    rows = session.rows(
        f"SELECT t.entity, e.kind, e.id, e.name, {_busy(metrics)} AS busy"
        f"{''.join(f', t.{each}' for each in columns)} "
        f"FROM {quoted(table_name(grain, source))} AS t JOIN entity AS e ON e.key = t.entity "
        "WHERE t.bucket = ? ORDER BY busy DESC, e.id, t.entity LIMIT ?",
        [bucket, limit],
    )
    more = most is not None and len(rows) > most
    rows = rows[:most]
    layers = read_layers(session, (row[0] for row in rows))
    found = []
    for key, kind, id_, name, busy, *cells in rows:
        values = {}
        start = 0
        for each in metrics:
            end = start + len(each.columns)
            states = each.plan.states(cells[start:end])
            value = each.plan.value(states, grain.minutes)
            if value is not None:
                values[each.name] = value
            start = end
        found.append(
            EntityValues(source, kind, id_, name, layers.get(key, frozenset()), busy, values)
        )
    return found, more


def _busy(metrics: Sequence[StoredMetric]) -> str:
    """How many rows the entity had, as the mean of all that its metrics count, as SQL."""
    counts: list[str] = []
    for each in metrics:
        columns = iter(each.columns)
        for shape in each.plan.shapes:
            taken = [next(columns) for _ in shape.cells]
            if shape is Shape.COUNT:
                counts += taken
    counts = counts[:_MOST_COUNTS]
    if not counts:
        return "0"
    return f"({' + '.join(f'coalesce(t.{each}, 0)' for each in counts)}) / {len(counts)}"


def _left_out(
    session: Session,
    grain: Grain,
    bucket: int,
    metrics: Sequence[StoredMetric],
    found: Sequence[EntityValues],
) -> dict[str, int]:
    """By metric, how many entities have a value and were not read."""
    table = quoted(table_name(grain, metrics[0].source))
    sums = ", ".join(f"sum(CASE WHEN {has_value(each)} THEN 1 ELSE 0 END)" for each in metrics)
    ((*counted,),) = session.rows(f"SELECT {sums} FROM {table} AS t WHERE t.bucket = ?", [bucket])
    missing = {
        each.name: int(count or 0) - sum(each.name in entity.values for entity in found)
        for each, count in zip(metrics, counted, strict=True)
    }
    return {name: count for name, count in missing.items() if count > 0}
