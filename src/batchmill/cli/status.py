"""``batchmill status``: prints how a run is doing; the exit code is its health."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from batchmill.cli.options import add_home_options, home_of
from batchmill.errors import BatchmillError
from batchmill.run import LAG_S, Health, read_status


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "status",
        help="print how `batchmill run` is doing",
        description="Print processes, queue, spool, lag, last commit, and what was dropped and "
        "why. The exit code is 0 if the run is healthy, 1 if something is wrong but spans are "
        "received, 2 if none are.",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument(
        "--max-lag", type=float, default=LAG_S, metavar="S", help="degraded beyond (default: 60)"
    )
    add_home_options(parser)


def run(given: argparse.Namespace) -> int:
    """Print the status; the exit code."""
    try:
        status = read_status(home_of(given), given.max_lag)
    except BatchmillError as error:
        print(f"batchmill status: {error}", file=sys.stderr)
        return Health.DOWN
    if given.json:
        print(json.dumps(status.as_json(), ensure_ascii=False))
    else:
        print(*status.lines(), sep="\n")
    return status.health
