"""``batchmill run``: the whole pipeline in one folder, supervised until Ctrl-C."""

from __future__ import annotations

import argparse
import math
import sys
from typing import Any

from batchmill.cli.options import add_settings_options, number, settings_of
from batchmill.errors import BatchmillError, ConfigError
from batchmill.run import ConfigFileError, UnknownSettingError

FOREVER = "forever"
LONGEST_DEMO_S = 86_400.0


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "run",
        help="receive spans and compute metrics: everything, in one folder",
        description="Start ingest, pipeline, exporters and web UI, restart what dies, and show "
        "what happens. Ctrl-C lets ingest finish its requests and the pipeline read the rest, then "
        "stops; a second Ctrl-C stops at once. Settings come from the options, from BATCHMILL_… "
        "variables and from batchmill.toml, in this order; `batchmill config show` lists them.",
    )
    parser.add_argument(
        "--demo",
        type=_demo_seconds,
        metavar="SECONDS",
        help=f"also send the spans of a simulated shop, for so long or {FOREVER}; ends with a "
        "balance, and the exit code is 1 if it does not balance",
    )
    parser.add_argument("--demo-seed", type=int, metavar="N", help="for the same spans again")
    add_settings_options(parser)


def run(given: argparse.Namespace) -> int:
    """Run it; the exit code."""
    from batchmill.run import Demo, run_processes

    try:
        demo = None if given.demo is None else Demo(given.demo, given.demo_seed)
        return run_processes(settings_of(given), demo)
    except BatchmillError as error:
        print(f"batchmill run: {error}", file=sys.stderr)
        wrong_settings = (ConfigError, ConfigFileError, UnknownSettingError)
        return 2 if isinstance(error, wrong_settings) else 1


def _demo_seconds(text: str) -> float:
    if text == FOREVER:
        return math.inf
    try:
        return number(LONGEST_DEMO_S)(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, or {FOREVER}") from None
