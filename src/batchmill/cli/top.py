"""``batchmill top``: the web UI's pipeline page in the terminal."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from batchmill.cli.options import add_home_options, home_of
from batchmill.errors import BatchmillError
from batchmill.run import Health


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "top",
        help="watch a run in the terminal",
        description="Show a run with live numbers: queues by partition, thresholds, threads, "
        "spool, micro-batches by phase, lag, what was dropped and why, processes. It is updated "
        "each second; q or Ctrl-C quits, and the run goes on. Without a terminal, or with --once, "
        "it is printed once, and the exit code is that of `batchmill status`.",
    )
    add_home_options(parser)
    parser.add_argument("--once", action="store_true", help="print it once, then end")


def run(given: argparse.Namespace) -> int:
    """Watch; the exit code."""
    from batchmill.run import show_run

    try:
        home = home_of(given)
    except BatchmillError as error:
        print(f"batchmill top: {error}", file=sys.stderr)
        return Health.DOWN
    return show_run(home, once=given.once)
