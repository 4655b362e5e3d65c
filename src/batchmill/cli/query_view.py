"""The output of ``batchmill query``: tables, JSON lines, charts of blocks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from batchmill.sources import Grain, bucket_end, bucket_start
from batchmill.store import StoredMetric, TopRecord, Value

BLOCKS = "▁▂▃▄▅▆▇█"
GAP = " "
NAME_WIDTH = 32
LEAST_CHART = 20
NUMBERS_WIDTH = 42
"""The room for the numbers behind a chart."""
FORMER_NAMES = {"entity_id": "entity", "entity_name": "name"}
"""Fields that JSON has under a second name as well: the one that they had at first."""


def show_metrics(metrics: Sequence[StoredMetric], *, as_json: bool) -> None:
    """Metrics, one a line."""
    if as_json:
        for metric in metrics:
            _print_json(
                {
                    "metric": metric.name,
                    "version": metric.version,
                    "source": metric.source,
                    "function": metric.function,
                    "decorator": metric.decorator,
                    "labelled": metric.labelled,
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
            _print_json({**_with_former_names(asdict(record)), "grain": record.grain.value})
        return
    table = _table("time", "entity", "#", "ms", "statement", "runs", "total ms", "trace")
    for record in records:
        _add(
            table,
            *(time_text(record.bucket), record.entity_name, record.rank, record.latency),
            *(record.statement, record.runs, record.total_ms, record.trace_id),
        )
    _print(table)


def show_json(values: Iterable[Value]) -> int:
    """Values as JSON, one object a line; how many there were."""
    count = 0
    for count, value in enumerate(values, start=1):  # noqa: B007 - the last one is the answer
        fields = {
            "metric": value.metric,
            "grain": value.grain.value,
            "bucket": value.bucket,
            "time": bucket_start(value.bucket).isoformat(),
            "entity_id": value.entity_id,
            "entity_name": value.entity_name,
            "layers": sorted(value.layers),
            "value": value.value,
        }
        _print_json(_with_former_names(fields))
    return count


def _with_former_names(fields: dict[str, Any]) -> dict[str, Any]:
    return fields | {former: fields[name] for name, former in FORMER_NAMES.items()}


def show_table(values: Sequence[Value], *, left_out: int) -> None:
    """Values as a table, with a column for each label."""
    labels = list(dict.fromkeys(label for value in values for label in _numbers(value)))
    table = _table("time", "entity", *(label or "value" for label in labels))
    for value in values:
        numbers = _numbers(value)
        shown = (_number(numbers.get(label)) for label in labels)
        _add(table, time_text(value.bucket), value.entity_name, *shown)
    _print(table)
    _say_left_out(len(values), left_out)


def show_chart(values: Sequence[Value], *, left_out: int) -> None:
    """Values as a line of blocks for each entity, or for each of its labels."""
    console = Console()
    lines: dict[tuple[str, str], dict[int, float]] = {}
    for value in values:
        for label, number in _numbers(value).items():
            name = f"{value.entity_name} {label}".strip()
            lines.setdefault((name, value.entity_id), {})[value.bucket] = number
    first, last = values[0].bucket, values[-1].bucket
    slots = _slots(values[0].grain, first, last)
    longest = min(NAME_WIDTH, max(len(name) for name, _ in lines))
    width = max(LEAST_CHART, console.width - longest - NUMBERS_WIDTH)
    for (name, _), points in sorted(lines.items()):
        drawn = blocks([points.get(bucket) for bucket in slots], width)
        present = list(points.values())
        newest = points[max(points)]
        figures = f"min {_number(min(present))} max {_number(max(present))} last {_number(newest)}"
        shown = name if len(name) <= longest else name[: longest - 1] + "…"
        console.print(Text(f"{shown:<{longest}} {drawn} {figures}"), soft_wrap=True)
    console.print(Text(f"{time_text(first)} to {time_text(last)}"), soft_wrap=True)
    _say_left_out(len(values), left_out)


def _say_left_out(shown: int, left_out: int) -> None:
    if left_out:
        total = left_out + shown
        _print(Text(f"the newest {shown} of {total} values; --limit {total} shows all"))


def blocks(numbers: Sequence[float | None], width: int) -> str:
    """A line of blocks, from 0 or the least to the greatest; a gap where there is nothing.

    With more numbers than places, each place stands for the greatest of its share.

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
    low, high = min(0, *present), max(present)
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
    Console().print(shown)


def _print_json(content: dict[str, Any]) -> None:
    print(json.dumps(content, ensure_ascii=False))
