"""The output of ``batchmill query``: tables, JSON lines, charts of blocks."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from batchmill.sources import (
    EntityIdError,
    Grain,
    bucket_end,
    bucket_start,
    split_entity_id,
)
from batchmill.store import StoredMetric, TopRecord, Value

BLOCKS = "▁▂▃▄▅▆▇█"
GAP = " "
FILLING = "░"
"""A bucket that is still filling: it has too little yet."""
NAME_WIDTH = 32
LEAST_CHART = 20
TICKS = 20
"""How far apart the times below a chart are."""
ARROW = " → "
WIDEST = 100_000
NUMBERS_WIDTH = 42
"""The room for the numbers behind a chart."""


def show_metrics(metrics: Sequence[StoredMetric], *, as_json: bool) -> None:
    """Metrics, one a line."""
    if as_json:
        for metric in metrics:
            _print_json(
                {
                    "name": metric.name,
                    "version": metric.version,
                    "source": metric.source,
                    "function": metric.function,
                    "decorator": metric.decorator,
                    "labelled": metric.labelled,
                    "active": metric.active,
                    "since_minute": metric.since_minute,
                    "definition": metric.definition,
                }
            )
        return
    table = _table("metric", "source", "function", "definition")
    for metric in metrics:
        _add(table, metric.name, metric.source, metric.function, metric.definition)
    _print(table)


def show_records(records: Sequence[TopRecord], *, as_json: bool) -> None:
    """Slow calls, one a line."""
    if as_json:
        for record in records:
            _print_json({**asdict(record), "grain": record.grain.value})
        return
    table = _table("time", "entity", "#", "ms", "statement", "runs", "total ms", "trace")
    for record in records:
        _add(
            table,
            *(time_text(record.bucket), record.entity_name, record.rank, record.latency),
            *(record.statement, record.runs, record.total_ms, record.trace_id),
        )
    _print(table)


def show_json(values: Iterable[Value], complete_s: int) -> int:
    """Values as JSON, one object a line; how many there were.

    ``complete`` is whether a bucket ends at ``complete_s``, in seconds since 1970, or before.
    """
    count = 0
    for count, value in enumerate(values, start=1):  # noqa: B007 - the last one is the answer
        _print_json(
            {
                "metric": value.metric,
                "grain": value.grain.value,
                "bucket": value.bucket,
                "time": bucket_start(value.bucket).isoformat(),
                "entity_id": value.entity_id,
                "entity_name": value.entity_name,
                "layers": sorted(value.layers),
                "value": value.value,
                "complete": not _is_filling(value.bucket, complete_s),
            }
        )
    return count


@dataclass(frozen=True, slots=True)
class Unit:
    """How people read the values of a metric."""

    name: str = ""
    divisor: int = 1
    """A value is so many times what is shown."""

    @classmethod
    def of(cls, metric: StoredMetric) -> Unit:
        """The unit of a metric; shares are shown as percent, microseconds as they are stored."""
        unit = metric.unit
        return _UNITS.get((unit.name, unit.factor), cls())

    def heading(self, label: str) -> str:
        """The heading of a column of such values."""
        return f"{label or 'value'} ({self.name})" if self.name else label or "value"

    def shown(self, number: float | None) -> str:
        """A value, without the unit's name."""
        if number is None or self.divisor == 1:
            return _number(number)
        return f"{number / self.divisor:,.{len(str(self.divisor)) - 1}f}"


_UNITS = {
    ("share", 10_000): Unit("%", 100),
    ("score", 10_000): Unit("", 10_000),
    ("per_minute", 1): Unit("per min"),
    ("percent", 1): Unit("%"),
    ("ms", 1): Unit("ms"),
    ("ms", 1000): Unit("µs"),
    ("bytes", 1): Unit("bytes"),
}


def show_table(
    values: Sequence[Value], metric: StoredMetric, *, left_out: int, complete_s: int
) -> None:
    """Values as a table, with a column for each label.

    If there are buckets that end after ``complete_s``, the last column marks them.
    """
    unit = Unit.of(metric)
    labels = list(dict.fromkeys(label for value in values for label in _numbers(value)))
    filling = {bucket for value in values if _is_filling(bucket := value.bucket, complete_s)}
    table = _table("time", "entity", *map(unit.heading, labels), *(["filling"] if filling else []))
    for value in values:
        numbers = _numbers(value)
        shown = (unit.shown(numbers.get(label)) for label in labels)
        mark = FILLING if value.bucket in filling else ""
        _add(table, time_text(value.bucket), _name(value), *shown, *([mark] if filling else []))
    _print(table)
    _say_left_out(len(values), left_out)


def show_chart(
    values: Sequence[Value], metric: StoredMetric, *, left_out: int, complete_s: int
) -> None:
    """Values as a line of blocks for each entity, or for each of its labels; all on one scale.

    Buckets that end after ``complete_s``, in seconds since 1970, are still filling: they are marked
    and count only where there is nothing else.
    """
    console, unit = Console(), Unit.of(metric)
    lines: dict[tuple[str, str], dict[int, float]] = {}
    for value in values:
        for label, number in _numbers(value).items():
            lines.setdefault((_name(value), label), {})[value.bucket] = number
    first, last = values[0].bucket, values[-1].bucket
    slots = _slots(values[0].grain, first, last)
    names = {key: _short(key[0], NAME_WIDTH - len(key[1])) + f" {key[1]}".rstrip() for key in lines}
    longest = max(map(len, names.values()))
    width = min(len(slots), max(LEAST_CHART, console.width - longest - NUMBERS_WIDTH))
    filling = {bucket for bucket in slots if _is_filling(bucket, complete_s)}
    complete = {key: _complete(points, filling) for key, points in lines.items()}
    counted = [points for points in complete.values() if not filling.issuperset(points)]
    everything = [n for points in counted or complete.values() for n in points.values()]
    low, high = min(0, *everything), max(everything)
    for key, points in sorted(lines.items()):
        drawn = _line([points.get(bucket) for bucket in slots], width, low, high, len(filling))
        present = complete[key]
        least, most = map(unit.shown, (min(present.values()), max(present.values())))
        newest = unit.shown(present[max(present)])
        figures = f"min {least} max {most} last {newest}"
        console.print(Text(f"{names[key]:<{longest}} {drawn} {figures}"), soft_wrap=True)
    console.print(Text(f"{'':{longest}} {_time_axis(slots, width)}".rstrip()), soft_wrap=True)
    scale = f"{BLOCKS[0]} is {unit.shown(low)}, {BLOCKS[-1]} is {unit.shown(high)} {unit.name}"
    span = f"{time_text(first)} to {time_text(last)}; {scale.rstrip()}"
    if filling:
        span += f", {FILLING} is still filling"
    console.print(Text(span), soft_wrap=True)
    _say_left_out(len(values), left_out)


def _is_filling(bucket: int, complete_s: int) -> bool:
    """Whether a bucket has too little yet: it ends after what is complete."""
    return bucket_end(bucket).timestamp() > complete_s


def _complete(points: Mapping[int, float], filling: Collection[int]) -> Mapping[int, float]:
    """The points of a line that are complete, or all if none is."""
    complete = {bucket: number for bucket, number in points.items() if bucket not in filling}
    return complete or points


def _line(
    numbers: Sequence[float | None], width: int, low: float, high: float, filling: int
) -> str:
    """A line of blocks of which the last ``filling`` numbers are only marked."""
    end = len(numbers) - filling
    drawn = blocks([*numbers[:end], *[None] * filling], width, low, high)
    marks = blocks([*[None] * end, *numbers[end:]], width)
    return "".join(
        FILLING if block == GAP and mark != GAP else block
        for block, mark in zip(drawn, marks, strict=True)
    )


def _time_axis(slots: Sequence[int], width: int) -> str:
    """The times below a chart, each where its tick stands."""
    forms = {Grain.MINUTE: "%H:%M", Grain.HOUR: "%d %H:%M", Grain.DAY: "%m-%d"}
    axis = ""
    for place in range(width):
        if place % TICKS == 0 or place < len(axis):
            if place >= len(axis):
                start = bucket_start(slots[len(slots) * place // width])
                axis += f"└{start.strftime(forms[Grain.of(slots[0])])}"
        else:
            axis += "─"
    return axis


def _name(value: Value) -> str:
    """An entity's name; of a relation both ends."""
    for kind in ("service_relation", "instance_relation", "endpoint_relation"):
        with contextlib.suppress(EntityIdError):
            names = split_entity_id(kind, value.entity_id)
            if names[-1] == value.entity_name:
                half = len(names) // 2
                return f"{' '.join(names[:half])}{ARROW}{' '.join(names[half:])}"
    return value.entity_name


def _short(name: str, width: int) -> str:
    """A name that fits; of a relation, something of both ends."""
    if len(name) <= width:
        return name
    caller, arrow, callee = name.partition(ARROW)
    if not arrow:
        return f"{name[: width - 1]}…"
    room = width - len(ARROW)
    of = max(room // 2, room - len(callee))
    return f"{_short(caller, of)}{ARROW}{_short(callee, max(room // 2, room - len(caller)))}"


def _say_left_out(shown: int, left_out: int) -> None:
    if left_out:
        total = left_out + shown
        _print(Text(f"the newest {shown} of {total} values; --limit {total} shows all"))


def blocks(
    numbers: Sequence[float | None],
    width: int,
    low: float | None = None,
    high: float | None = None,
) -> str:
    """A line of blocks, from ``low`` to ``high``; a gap where there is nothing.

    Without them, from 0 or the least number to the greatest. With more numbers than places, each
    place stands for the greatest of its share.

    >>> blocks([0, 5, None, 10], 10)
    '▁▄ █'
    """
    if len(numbers) > width:
        count = len(numbers)
        shares = (
            numbers[count * place // width : count * (place + 1) // width] for place in range(width)
        )
        numbers = [max((n for n in share if n is not None), default=None) for share in shares]
    present = [n for n in numbers if n is not None]
    if not present:
        return GAP * len(numbers)
    low = min(0, *present) if low is None else low
    high = max(present) if high is None else high
    spread = (high - low) or 1
    top = len(BLOCKS) - 1
    return "".join(GAP if n is None else BLOCKS[int((n - low) / spread * top)] for n in numbers)


def time_text(bucket: int) -> str:
    """A bucket as people write it."""
    start = bucket_start(bucket)
    return start.strftime("%Y-%m-%d" if Grain.of(bucket) is Grain.DAY else "%Y-%m-%d %H:%M")


def _slots(grain: Grain, first: int, last: int) -> list[int]:
    slots = [first]
    while slots[-1] < last:
        slots.append(grain.bucket(bucket_end(slots[-1])))
    return slots


def _numbers(value: Value) -> dict[str, float]:
    return dict(value.value) if isinstance(value.value, dict) else {"": value.value}


def _number(number: float | None) -> str:
    if number is None:
        return ""
    return f"{number:,}" if isinstance(number, int) else f"{number:,.6g}"


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        text = name in ("time", "entity", "metric", "source", "function", "definition", "statement")
        table.add_column(Text(name), justify="left" if text else "right", overflow="fold")
    return table


def _add(table: Table, *cells: Any) -> None:
    # As Text, so that names with [brackets] are not taken for markup.
    table.add_row(*(Text(str(cell)) for cell in cells))


def _print(shown: Table | Text) -> None:
    console = Console()
    if not console.is_terminal:  # a line is a line, for grep and awk, however long it is
        console = Console(width=WIDEST)
    console.print(shown)


def _print_json(content: dict[str, Any]) -> None:
    print(json.dumps(content, ensure_ascii=False))
