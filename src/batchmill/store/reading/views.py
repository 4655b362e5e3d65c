"""Views for people who read the store with SQL: plain names, and values instead of states.

Each event type has a view for each grain, such as ``endpoint_minute``: ``time``, ``bucket``,
``entity_id``, ``entity_name``, and a column for each metric that is computed, with the value that
:meth:`Store.values` has. Views of relations also have ``source_name``, the caller. A percentile has
a column for each rank, ``…_p50`` to ``…_p99``. Metrics with other labels have no column: their
labels are not known to SQL before they are read.

Views are made anew when metrics are registered, if that changes them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from batchmill.oal import RANKS
from batchmill.sources import Grain
from batchmill.store.results import StoredMetric
from batchmill.store.sql.registry import all_metrics
from batchmill.store.sql.session import Session, quote, table_name
from batchmill.store.states import Shape

log = logging.getLogger("batchmill.store")

META = "view "
"""In the store's table of facts, the definition of each view has a key that begins with this."""
MAX_COLUMNS = 1_500
"""Databases allow a few more."""
MAX_NAME_BYTES = 63
"""PostgreSQL cuts longer names off."""
_HALF = 1 << 32
_LIMB = float(1 << 30)
_SCALE = 10_000


@dataclass(frozen=True, slots=True)
class Words:
    """What the two databases write differently in a view."""

    floating: str
    divide: str
    """The quotient of two whole numbers of any size, toward zero."""
    pieces: str
    """The table of the pieces of a tally, with the column ``piece``."""
    key: str
    count: str
    whole_max: str
    caller: str
    """Of a relation, the name of the instance or endpoint that calls, else of the service."""
    moment: str
    """The start of a bucket: of ``{year}``, ``{month}`` and so on."""


SQLITE = Words(
    floating="REAL",
    divide="({0} / {1})",
    pieces="""(SELECT value AS piece FROM json_each('["' || replace({0}, ',', '","') || '"]'))""",
    key="CAST(substr(piece, 1, instr(piece || ':', ':') - 1) AS INTEGER)",
    count="coalesce(CAST(nullif(substr(piece, instr(piece || ':', ':') + 1), '') AS INTEGER), 1)",
    whole_max="max(0, {0})",
    caller="coalesce(json_extract(e.roles, '$.source_name'), "
    "json_extract(e.roles, '$.source_service'))",
    moment="printf('%04d-%02d-%02d %02d:%02d', {year}, {month}, {day}, {hour}, {minute})",
)
POSTGRES = Words(
    floating="DOUBLE PRECISION",
    divide="div({0}, {1})",
    pieces="(SELECT unnest(string_to_array({0}, ',')) AS piece) AS pieces",
    key="CAST(split_part(piece, ':', 1) AS BIGINT)",
    count="coalesce(CAST(nullif(split_part(piece, ':', 2), '') AS BIGINT), 1)",
    whole_max="greatest(0, {0})",
    caller="coalesce(CAST(e.roles AS json) ->> 'source_name', "
    "CAST(e.roles AS json) ->> 'source_service')",
    moment="make_timestamp(CAST({year} AS INTEGER), CAST({month} AS INTEGER), "
    "CAST({day} AS INTEGER), CAST({hour} AS INTEGER), CAST({minute} AS INTEGER), 0) "
    "AT TIME ZONE 'UTC'",
)


def refresh_views(session: Session) -> None:
    """Make the views of the metrics that are computed now, in the transaction that is open."""
    words = POSTGRES if session.dialect.name == "postgresql" else SQLITE
    by_source: dict[str, list[StoredMetric]] = {}
    for metric in all_metrics(session):
        if metric.active and metric.columns:
            by_source.setdefault(metric.source, []).append(metric)
    known = session.rows("SELECT key, value FROM meta WHERE key LIKE ?", (f"{META}%",))
    existing = {str(key).removeprefix(META): str(value) for key, value in known}
    wanted: dict[str, str] = {}
    for source, metrics in sorted(by_source.items()):
        for grain in Grain:
            name = view_name(source, grain)
            if name in wanted:  # of a source whose name differs in underscores only
                name = f"{source.lower()}_{grain.value}"
            if name not in existing and session.has_table(name):
                log.warning("batchmill store: there is no view %s: the name is in use", name)
            elif len(name.encode()) > MAX_NAME_BYTES:
                log.warning("batchmill store: there is no view %s: the name is too long", name)
            else:
                wanted[name] = definition(source, grain, metrics, words)
    for name, before in sorted(existing.items()):
        if wanted.get(name) == before:
            del wanted[name]
        elif not session.drop_view(name):
            wanted.pop(name, None)
            log.warning(
                "batchmill store: the view %s cannot be brought up to date, because other views "
                "use it: drop those, and start the pipeline again",
                name,
            )
        else:
            session.run("DELETE FROM meta WHERE key = ?", (META + name,))
    for name, select in wanted.items():
        session.run(f"CREATE VIEW {quote(name)} AS {select}")
        session.run("INSERT INTO meta VALUES (?, ?)", (META + name, select))


def view_name(source: str, grain: Grain) -> str:
    """The name of a view.

    >>> view_name("ServiceRelation", Grain.HOUR)
    'service_relation_hour'
    """
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", source)
    return f"{words.lower()}_{grain.value}"


def definition(source: str, grain: Grain, metrics: Sequence[StoredMetric], words: Words) -> str:
    """The query behind a view."""
    columns = [
        f"{_moment(grain, words)} AS time",
        "t.bucket AS bucket",
        "e.id AS entity_id",
        "e.name AS entity_name",
    ]
    if source.endswith("Relation"):
        columns.append(f"{words.caller} AS source_name")
    taken = {"time", "bucket", "entity_id", "entity_name", "source_name"}
    for metric in metrics:
        for name, value in _columns(metric, grain, words):
            fits = len(name.encode()) <= MAX_NAME_BYTES and name.lower() not in taken
            if fits and len(columns) < MAX_COLUMNS:
                taken.add(name.lower())
                columns.append(f"{value} AS {quote(name)}")
            else:
                log.warning(
                    "batchmill store: the views of %s have no column %s: its name is in use or "
                    "too long, or there are too many",
                    source,
                    name,
                )
    return (
        f"SELECT {', '.join(columns)} FROM {quote(table_name(grain, source))} AS t "
        "JOIN entity AS e ON e.key = t.entity"
    )


def _moment(grain: Grain, words: Words) -> str:
    minute = {Grain.MINUTE: "t.bucket", Grain.HOUR: "t.bucket * 100", Grain.DAY: "t.bucket * 10000"}
    whole = f"({minute[grain]})"
    return words.moment.format(
        year=f"{whole} / 100000000",
        month=f"{whole} / 1000000 % 100",
        day=f"{whole} / 10000 % 100",
        hour=f"{whole} / 100 % 100",
        minute=f"{whole} % 100",
    )


def _columns(metric: StoredMetric, grain: Grain, words: Words) -> Iterator[tuple[str, str]]:
    """The columns of a metric: names and values."""
    plan = metric.plan
    if plan.function in ("percentile2", "percentile", "percentileLog"):
        for rank in RANKS:
            yield f"{metric.name}_p{rank}", _percentile(metric, rank, words)
        return
    cells = iter([f"t.{column}" for column in metric.columns])
    states = [_state(shape, [next(cells) for _ in shape.cells], words) for shape in plan.shapes]
    if all(state is not None for state in states):
        value = _value(plan.function, [str(state) for state in states], grain, words)
        if value is not None:
            yield metric.name, value


def _state(shape: Shape, cells: Sequence[str], words: Words) -> str | None:
    """A merged state; None: there is no plain expression for it."""
    if shape is Shape.COUNT:
        return f"coalesce({cells[0]}, 0)"
    if shape in (Shape.NUMBERS, Shape.LABELS, Shape.LABEL_SUMS):
        return None
    if len(cells) == 1:
        return cells[0]
    filled = [f"coalesce({cell}, 0)" for cell in cells]
    if shape is Shape.DOUBLE_SUM:
        whole, limbs = filled[0], filled[1:]
    else:
        # Not a 64-bit number: it may be larger than that.
        whole, limbs = f"(CAST({filled[0]} AS NUMERIC) * {_HALF} + {filled[1]})", filled[2:]
    if limbs:
        parts = [f"{limb} / {_LIMB ** (place + 1)!r}" for place, limb in enumerate(limbs)]
        whole = f"(CAST({whole} AS {words.floating}) + {' + '.join(parts)})"
    return f"CASE WHEN coalesce({', '.join(cells)}) IS NOT NULL THEN {whole} END"


def _value(function: str, states: Sequence[str], grain: Grain, words: Words) -> str | None:
    """What ``batchmill.oal.values`` computes, in SQL; None for a function not known here."""
    first = states[0]
    if function in ("count", "cpm"):
        count = f"nullif({first}, 0)"
        return count if function == "count" else f"{count} / {grain.minutes}"
    if function in ("sum", "min"):
        return first
    if function == "max":
        return f"CASE WHEN {first} IS NOT NULL THEN {words.whole_max.format(first)} END"
    if function in ("sumDouble", "minDouble", "maxDouble"):
        value = f"CAST({first} AS {words.floating})"
        if function != "maxDouble":
            return value
        return f"CASE WHEN {first} IS NOT NULL THEN {words.whole_max.format(value)} END"
    rows = states[-1]
    if function == "longAvg":
        quotient = words.divide.format(f"coalesce({first}, 0)", rows)
    elif function == "doubleAvg":
        quotient = f"CAST(coalesce({first}, 0) AS {words.floating}) / {rows}"
    elif function == "percent":
        quotient = f"{first} * {_SCALE} / {rows}"
    elif function == "rate":
        quotient = f"CASE WHEN {states[1]} = 0 THEN 0 ELSE {first} * {_SCALE} / {states[1]} END"
    elif function == "apdex":
        quotient = f"({first} * {_SCALE} + {states[1]} * {_SCALE} / 2) / {rows}"
    else:
        return None
    return f"CASE WHEN {rows} > 0 THEN {quotient} END"


def _percentile(metric: StoredMetric, rank: int, words: Words) -> str:
    """The value at a rank: the bucket at which the running count reaches the rank's share."""
    if metric.plan.function == "percentileLog":
        shift = words.whole_max.format("(bucket >> 6) - 1")
        value = f"(bucket - (CAST({shift} AS INTEGER) << 6)) << CAST({shift} AS INTEGER)"
    else:
        value = f"bucket * {metric.plan.args[0]}"
    pieces = words.pieces.format(f"t.{metric.columns[0]}")
    return (
        f"(SELECT {value} FROM (SELECT bucket, sum(n) OVER (ORDER BY bucket) AS running, "
        f"sum(n) OVER () AS total FROM (SELECT {words.key} AS bucket, sum({words.count}) AS n "
        f"FROM {pieces} GROUP BY 1) AS tally) AS ranked "
        f"WHERE running >= {words.divide.format(f'(total * {rank} + 50)', '100')} "
        "ORDER BY bucket LIMIT 1)"
    )
