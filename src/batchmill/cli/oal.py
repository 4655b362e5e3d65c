"""``batchmill oal check``: what scripts define and what that costs, or all that is wrong with them.

Draws with rich where a terminal shows it and rich is there; writes plain lines otherwise.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from batchmill.cli.sources import SourcesError, import_sources
from batchmill.oal import Description, MetricSet, OalErrors, describe, load

HEADINGS = ("metric", "source", "measured", "function", "filters", "cost")


def run(paths: Sequence[str], sources: Sequence[str] = ()) -> int:
    """Check the scripts in files and folders; the exit code, 1 where anything is wrong.

    ``sources`` are the modules with the event types that do not come with batchmill.
    """
    try:
        import_sources(sources)
        metrics = load([Path(each) for each in paths])
    except OalErrors as errors:
        print(errors, file=sys.stderr)
        return 1
    except SourcesError as error:
        print(f"batchmill oal check: {error}", file=sys.stderr)
        return 1
    rows = describe(metrics)
    if not (sys.stdout.isatty() and _draw(rows)):
        _print_plain(rows)
    print(_summary(metrics, rows))
    return 0


def _cells(row: Description) -> tuple[str, ...]:
    decorated = f" @{row.decorator}" if row.decorator else ""
    filters = " and ".join(row.filters) or "-"
    return (row.metric + decorated, row.source, row.measured, row.function, filters, row.cost)


def _print_plain(rows: Sequence[Description]) -> None:
    """Columns as wide as their longest cell, so that `grep` and `awk -F'  +'` can read them."""
    table = [HEADINGS, *map(_cells, rows)]
    widths = [max(len(line[column]) for line in table) for column in range(len(HEADINGS))]
    for line in table:
        padded = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print("  ".join(padded).rstrip())


def _draw(rows: Sequence[Description]) -> bool:
    """Draw the table; False where rich is missing."""
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    styles = ("bold", "cyan", "", "green", "yellow", "bright_black")
    for heading, style in zip(HEADINGS, styles, strict=True):
        table.add_column(heading, style=style, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in _cells(row)))
    Console().print(table)
    return True


def _summary(metrics: MetricSet, rows: Sequence[Description]) -> str:
    sources = metrics.by_source()
    states = sum(len(metrics.states(source)) for source in sources)
    asked = sum(row.states for row in rows)
    said = (
        f"{len(metrics)} metrics over {len(sources)} sources; "
        f"{states} states for the {asked} that they ask for"
    )
    return f"{said}; disabled: {', '.join(sorted(metrics.disabled))}" if metrics.disabled else said
