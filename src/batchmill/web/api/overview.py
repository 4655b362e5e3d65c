"""All services over a range: their figures, bucket by bucket and over all of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batchmill.sources import Grain
from batchmill.store import Named, Snapshot
from batchmill.web.api.figures import SERVICE, Figures, Number, Row
from batchmill.web.api.memory import Memory
from batchmill.web.api.params import choice, whole
from batchmill.web.api.range import Range, bucket, read_range
from batchmill.web.api.rows import Reader, by_entity
from batchmill.web.errors import BadQuestion

FIGURES = ("cpm", "avg", "p99", "success", "apdex")
SORTS = ("cpm", "name", "avg", "p99", "success", "apdex")
ORDERS = ("asc", "desc")
PARAMS = ("from", "to", "grain", "layer", "search", "sort", "order", "limit", "offset")
MOST_SERVICES = 1_000
MOST_POINTS = 1_000_000
_READ_ONCE = 200
"""Up to so many buckets are read for all services; of more, those of the services shown."""


@dataclass(frozen=True, slots=True)
class Question:
    """Which services are wanted, and how."""

    range: Range
    layer: str | None
    search: str | None
    sort: str
    descending: bool
    limit: int
    offset: int

    @classmethod
    def read(cls, params: Mapping[str, str], now_s: float) -> Question:
        """From the parameters."""
        sort = choice(params, "sort", "cpm", SORTS)
        order = choice(params, "order", "asc" if sort == "name" else "desc", ORDERS)
        found = cls(
            read_range(params, now_s),
            params.get("layer"),
            params.get("search"),
            sort,
            order == "desc",
            whole(params, "limit", 500, 1, MOST_SERVICES),
            whole(params, "offset", 0, 0, 10_000_000),
        )
        points = found.limit * len(found.range.times) * len(FIGURES)
        if points > MOST_POINTS:
            raise BadQuestion(
                f"that are up to {points:,} points, and {MOST_POINTS:,} are answered at most: "
                "ask for fewer services (limit), a shorter range or a coarser grain"
            )
        return found


def services(
    snapshot: Snapshot, question: Question, memory: Memory | None = None
) -> dict[str, Any]:
    """The answer."""
    wanted = question.range
    newest = snapshot.newest_minute()
    reader = Reader(snapshot, SERVICE.chosen(snapshot.metrics()), question.layer, memory)
    keys: list[int] | None = None
    if question.search:
        keys = snapshot.keys_like("service", question.search, question.layer)
    figures, minutes = reader.figures, wanted.minutes(newest)
    once = len(wanted.times) <= _READ_ONCE
    # What is shown bucket by bucket is read anyway: the range is made of the same rows then.
    coarsest = wanted.grain if once else Grain.DAY
    cover = wanted.cover(newest, coarsest, less=figures.can_take_away)
    shown = reader.rows(wanted.buckets, keys) if once else []
    sides = []
    for pieces in (cover.more, cover.less):
        rows: list[Row] = []
        for each in pieces:
            if once and each.grain is wanted.grain:
                rows += [row for row in shown if each.first <= row[0] <= each.last]
            else:
                rows += reader.rows(each, keys)
        sides.append(by_entity(rows))
    more, less = sides
    names = snapshot.named(more)
    total = {key: figures.over(more[key], minutes, less.get(key, ())) for key in names}
    # Of some there may be nothing left but what was taken away.
    names = {key: each for key, each in names.items() if any(map(_is_there, total[key].values()))}
    page = _sorted(names, total, question)[question.offset : question.offset + question.limit]
    if not once:
        shown = reader.rows(wanted.buckets, page)
    series = _series(by_entity(shown), wanted, figures, page)
    layers = snapshot.layers(page)
    return {
        "grain": wanted.grain.value,
        "from": wanted.start_s,
        "to": wanted.end_s,
        "times": wanted.times,
        "total": len(names),
        "services": [
            {
                "id": names[key].id,
                "name": names[key].name,
                "layers": sorted(layers.get(key, ())),
                "range": {each: total[key].get(each) for each in FIGURES},
                "series": series[key],
            }
            for key in page
        ],
    }


def _is_there(value: Number) -> bool:
    return value is not None


def _sorted(
    names: Mapping[int, Named], total: Mapping[int, Mapping[str, Number]], question: Question
) -> list[int]:
    """The keys in the order asked for; of equals by name, and those without a figure last."""
    keys = sorted(names, key=lambda key: (names[key].name, names[key].id))
    if question.sort == "name":
        return keys[::-1] if question.descending else keys
    figure: dict[int, float] = {}
    for key in keys:
        value = total[key].get(question.sort)
        if value is not None:
            figure[key] = -value if question.descending else value
    return sorted(keys, key=lambda key: (key not in figure, figure.get(key, 0)))


def _series(
    rows: Mapping[int, Sequence[Row]], wanted: Range, figures: Figures, keys: Sequence[int]
) -> dict[int, dict[str, list[Number]]]:
    """The figures of each bucket, by entity."""
    buckets = [bucket(wanted.grain, each) for each in wanted.times]
    missing: dict[str, list[Number]] = {each: [None] * len(buckets) for each in FIGURES}
    found = {}
    for key in keys:
        by_bucket = {row[0]: row for row in rows.get(key, ())}
        line = [by_bucket.get(each) for each in buckets]
        found[key] = missing | figures.series(line, wanted.grain.minutes)
    return found
