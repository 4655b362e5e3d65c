"""``batchmill oal check``: prints the metrics that scripts define, or all errors in them.

Draws a table if rich is installed and there is a terminal; prints plain lines otherwise.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from batchmill.cli.options import SourcesError, add_sources_option, import_sources
from batchmill.oal import Description, MetricSet, OalErrors, describe, load
from batchmill.wording import count_of

HEADINGS = ("metric", "source", "measured", "function", "filters", "cost")


def add_parser(commands: Any) -> None:
    """Add the command."""
    oal = commands.add_parser("oal", help="look at scripts of the metric language")
    actions = oal.add_subparsers(dest="action", required=True, metavar="action")
    check = actions.add_parser(
        "check",
        help="print the metrics that scripts define, or all errors in them",
        description="Print the metrics that scripts define and what they cost, or every error.",
    )
    check.add_argument("paths", nargs="+", metavar="FILE", help="a script, or a folder of *.oal")
    add_sources_option(check)


def run(arguments: argparse.Namespace) -> int:
    """Check the scripts in files and folders; the exit code is 1 if there is an error."""
    try:
        import_sources(arguments.sources)
        metrics = load([Path(path) for path in arguments.paths])
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
    unshared = sum(row.states for row in rows)
    text = (
        f"{count_of(len(metrics), 'metric')} over {count_of(len(sources), 'source')}; "
        f"{count_of(states, 'state')}, {unshared:,} without sharing"
    )
    return f"{text}; disabled: {', '.join(sorted(metrics.disabled))}" if metrics.disabled else text
