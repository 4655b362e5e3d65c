"""``batchmill status`` and ``batchmill top``: how a run is doing."""

from __future__ import annotations

import argparse
import json
from typing import Any

from batchmill.cli.options import add_home_options, home_of
from batchmill.run import LAG_S, read_status


def add_parser(commands: Any) -> None:
    """Add both commands."""
    status = commands.add_parser(
        "status",
        help="print how `batchmill run` is doing",
        description="Print processes, queue, spool, lag, last commit, and what was dropped and "
        "why. The exit code is 0 if the run is healthy, 1 if something is wrong but spans are "
        "received, 2 if none are.",
    )
    status.add_argument("--json", action="store_true", help="one JSON object")
    status.add_argument(
        "--max-lag", type=float, default=LAG_S, metavar="S", help="degraded beyond (default: 60)"
    )
    add_home_options(status)
    top = commands.add_parser(
        "top",
        help="watch a run in the terminal",
        description="Show a run with live numbers: queues by partition, thresholds, threads, "
        "spool, micro-batches by phase, lag, what was dropped and why, processes. It is updated "
        "each second; q or Ctrl-C quits, and the run goes on. Without a terminal, or with --once, "
        "it is printed once, and the exit code is that of `batchmill status`.",
    )
    add_home_options(top)
    top.add_argument("--once", action="store_true", help="print it once, then end")


def run(arguments: argparse.Namespace) -> int:
    """Print the status; the exit code."""
    status = read_status(home_of(arguments), arguments.max_lag)
    if arguments.json:
        print(json.dumps(status.as_json(), ensure_ascii=False))
    else:
        print(*status.lines(), sep="\n")
    return status.health


def run_top(arguments: argparse.Namespace) -> int:
    """Watch; the exit code."""
    from batchmill.run import show_run

    return show_run(home_of(arguments), once=arguments.once)
