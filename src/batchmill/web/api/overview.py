"""All services over a range: their measures by bucket and over the whole range."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from batchmill.sources import Grain, service_id
from batchmill.store import EntityName, Snapshot, StoredMetric
from batchmill.web.api.coverage import Coverage
from batchmill.web.api.measures import (
    CALLEE_SIDE,
    MANY,
    SERVICE,
    MeasureCache,
    Measures,
    Number,
    RangeRows,
    Row,
    RowReader,
    busiest,
    by_entity,
    few_or_busiest,
    merged,
)
from batchmill.web.api.parameters import (
    COMPARES,
    TimeRange,
    bucket,
    choice,
    earlier,
    read_range,
    whole,
)
from batchmill.web.responses import BadRequest

MEASURES = ("cpm", "avg", "p99", "success", "apdex")
SORTS = ("cpm", "name", "avg", "p99", "success", "apdex")
ORDERS = ("asc", "desc")
PARAMS = ("from", "to", "grain", "compare", "layer", "search", "sort", "order", "limit", "offset")
MOST_SERVICES = 1_000
MOST_POINTS = 1_000_000
_ALL = 2**31
"""More services than any store has."""
_USER_ID = service_id("User", normal=False)
"""The caller of requests that no service in the system made."""
_READ_ONCE = 200
"""Up to this many buckets are read for all services; of more, only for the services shown."""


@dataclass(frozen=True, slots=True)
class ServicesQuery:
    """Which services are requested, and how."""

    range: TimeRange
    before: TimeRange | None
    """The time to compare it with."""
    layer: str | None
    search: str | None
    sort: str
    descending: bool
    limit: int
    offset: int

    @classmethod
    def read(cls, params: Mapping[str, str], now_s: float) -> ServicesQuery:
        """Read and validate the parameters."""
        sort = choice(params, "sort", "cpm", SORTS)
        order = choice(params, "order", "asc" if sort == "name" else "desc", ORDERS)
        time_range = read_range(params, now_s)
        before = None
        if params.get("compare"):
            before = earlier(time_range, choice(params, "compare", "", COMPARES))
        query = cls(
            time_range,
            before,
            params.get("layer"),
            params.get("search"),
            sort,
            order == "desc",
            whole(params, "limit", 500, 1, MOST_SERVICES),
            whole(params, "offset", 0, 0, 10_000_000),
        )
        points = query.limit * len(query.range.times) * len(MEASURES) * (2 if before else 1)
        if points > MOST_POINTS:
            raise BadRequest(
                f"the result has up to {points:,} points, and at most {MOST_POINTS:,} are allowed: "
                "request fewer services (limit), a shorter range or a coarser grain"
            )
        return query


def services(
    snapshot: Snapshot, query: ServicesQuery, cache: MeasureCache | None = None
) -> dict[str, Any]:
    """The services of one page, with their measures; and the same ones at an earlier time."""
    answer, page = _page(snapshot, query, cache)
    before = None
    if query.before is not None:
        same = replace(query, range=query.before, offset=0)
        before, _ = _page(snapshot, same, cache, page)
        del before["total"]
    return {**answer, "before": before}


def _page(
    snapshot: Snapshot,
    query: ServicesQuery,
    cache: MeasureCache | None,
    chosen: list[int] | None = None,
) -> tuple[dict[str, Any], list[int]]:
    """The services of one page, or those that are ``chosen`` and have data; and their keys."""
    time_range = query.range
    metrics = snapshot.metrics()
    coverage = Coverage.read(snapshot, time_range, metrics)
    reader = RowReader(snapshot, SERVICE.chosen(metrics, time_range), query.layer, cache)
    keys, count = _keys(snapshot, reader, query) if chosen is None else (chosen, None)
    measures, minutes = reader.measures, coverage.minutes
    once = len(time_range.buckets) <= _READ_ONCE
    # The rows of the shown buckets are read anyway: the range is computed from the same rows.
    coarsest = time_range.grain if once else Grain.DAY
    cover = coverage.totals.cover(coverage.newest, coarsest, less=measures.can_subtract)
    shown = reader.rows(time_range.buckets, keys) if once else []
    sides = []
    for pieces in (cover.more, cover.less):
        rows: list[Row] = []
        for piece in pieces:
            if once and piece.grain is time_range.grain:
                rows += [row for row in shown if piece.first <= row[0] <= piece.last]
            else:
                rows += reader.rows(piece, keys)
        sides.append(by_entity(rows))
    more, less = sides
    # A service whose first calls are in the bucket that is still filling has no totals yet.
    starting = _keys_since(coverage, shown)
    names = snapshot.entity_names({**more, **dict.fromkeys(starting)})
    total = {
        key: measures.over(RangeRows(more.get(key, []), less.get(key, [])), minutes)
        for key in names
    }
    # Subtracting may leave a service without calls.
    names = {
        key: entity for key, entity in names.items() if key in starting or _has_values(total[key])
    }
    everything = total if query.layer is None and keys is None else None
    page = _sorted(names, total, query)[query.offset : query.offset + query.limit]
    if not once:
        shown = reader.rows(time_range.buckets, page)
    series = _series(by_entity(shown), coverage, measures, page)
    layers = snapshot.layers(page)
    answer = {
        "grain": time_range.step,
        "from": time_range.start_s,
        "to": time_range.end_s,
        "times": time_range.times,
        "incomplete": coverage.incomplete_s,
        "all": _entering(snapshot, coverage, metrics),
        "lowest": _lowest(snapshot, coverage, metrics, everything),
        "total": max(len(names), count or 0),
        "services": [
            {
                "id": names[key].id,
                "name": names[key].name,
                "layers": sorted(layers.get(key, ())),
                "range": {measure: total[key].get(measure) for measure in MEASURES},
                "series": series[key],
            }
            for key in page
        ],
    }
    return answer, page


def _keys(
    snapshot: Snapshot, reader: RowReader, query: ServicesQuery
) -> tuple[list[int] | None, int | None]:
    """The services to read, None for all; and how many there are, where some are left out.

    Of many, the busiest: all other orders are among those.
    """
    keys: list[int] | None = None
    if query.search:
        keys = snapshot.keys_like("service", query.search, query.layer)
        if len(keys) <= MANY:
            return keys, None
    elif snapshot.count("service") <= MANY:
        return None, None
    most = query.offset + query.limit
    if (query.sort, query.descending) != ("cpm", True):
        most = max(MANY, most)
    ranking = busiest(
        *(snapshot, reader.metrics, query.range),
        most=_ALL if keys else most,
        layer=query.layer,
    )
    if ranking is None:
        return keys, None
    if keys is None:
        return ranking.keys, ranking.total
    among = frozenset(keys)
    matching = [key for key in ranking.keys if key in among]
    return matching[:most], len(matching)


def _keys_since(coverage: Coverage, rows: Sequence[Row]) -> set[int]:
    """The keys of entities with calls in buckets that are still filling."""
    if coverage.incomplete_s is None:
        return set()
    first = bucket(coverage.range.grain, coverage.incomplete_s)
    return {row[1] for row in rows if row[0] >= first}


def _has_values(measures: Mapping[str, Number]) -> bool:
    return any(value is not None for value in measures.values())


def _entering(
    snapshot: Snapshot, coverage: Coverage, metrics: Sequence[StoredMetric]
) -> dict[str, Number]:
    """The measures of the requests that enter the system: those that no service in it made.

    A request is counted once, however many services it passes; whatever is searched for. Of many
    services that are called from outside, those of the busiest count; ``busiest`` says how many.
    """
    users, count = few_or_busiest(
        *(snapshot, "service_relation", [CALLEE_SIDE], coverage.range, MANY),
        id_begins=f"{_USER_ID}-",
    )
    reader = RowReader(snapshot, CALLEE_SIDE.chosen(metrics, coverage.range))
    rows = reader.ranged(coverage, [relation.key for relation in users])
    over = reader.measures.over(merged(rows.values()), coverage.minutes)
    entering = {measure: over.get(measure) for measure in ("cpm", "avg", "p99", "success")}
    return {**entering, "busiest": len(users) if count > len(users) else None}


def _lowest(
    snapshot: Snapshot,
    coverage: Coverage,
    metrics: Sequence[StoredMetric],
    total: Mapping[int, Mapping[str, Number]] | None,
) -> dict[str, Any] | None:
    """The service with the lowest success rate of all; of many, of the ``busiest``.

    ``total`` has the measures of all, if known.
    """
    ranking = None
    if total is None:
        chosen = SERVICE.chosen(metrics, coverage.range)
        reader = RowReader(
            snapshot, {name: metric for name, metric in chosen.items() if name == "success"}
        )
        if snapshot.count("service") > MANY:
            ranking = busiest(snapshot, chosen, coverage.range, MANY)
        rows = reader.ranged(coverage, None if ranking is None else ranking.keys)
        total = {key: reader.measures.over(own, coverage.minutes) for key, own in rows.items()}
    known: dict[int, float] = {}
    for key, own in total.items():
        success = own.get("success")
        if success is not None:
            known[key] = success
    if not known:
        return None
    least = min(known.values())
    named = snapshot.entity_names([key for key, success in known.items() if success == least])
    first = min(named.values(), key=lambda entity: (entity.name, entity.id))
    left_out = ranking is not None and ranking.total > len(ranking.keys)
    return {
        "id": first.id,
        "name": first.name,
        "success": least,
        "busiest": len(ranking.keys) if ranking is not None and left_out else None,
    }


def _sorted(
    names: Mapping[int, EntityName], total: Mapping[int, Mapping[str, Number]], query: ServicesQuery
) -> list[int]:
    """The keys in the requested order; equal ones by name, those without a value last."""
    keys = sorted(names, key=lambda key: (names[key].name, names[key].id))
    if query.sort == "name":
        return keys[::-1] if query.descending else keys
    sort_value: dict[int, float] = {}
    for key in keys:
        value = total[key].get(query.sort)
        if value is not None:
            sort_value[key] = -value if query.descending else value
    return sorted(keys, key=lambda key: (key not in sort_value, sort_value.get(key, 0)))


def _series(
    rows: Mapping[int, Sequence[Row]],
    coverage: Coverage,
    measures: Measures,
    keys: Sequence[int],
) -> dict[int, dict[str, list[Number]]]:
    """The measures of each bucket, by entity."""
    time_range, covered = coverage.range, coverage.minutes_by_bucket
    points = len(time_range.starts)
    missing: dict[str, list[Number]] = {measure: [None] * points for measure in MEASURES}
    series = {}
    for key in keys:
        line = measures.points(rows.get(key, ()), time_range)
        series[key] = missing | measures.series(line, time_range.step_minutes, covered)
    return series
