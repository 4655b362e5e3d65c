"""The ``batchmill`` command.

Loads without its extra, so that it can say which one is missing.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from typing import Any

from batchmill import __version__
from batchmill.cli import config, demo, export, ingest, query, run, status, stream, top, web
from batchmill.cli.sources import add_sources_option

LONGEST_QUEUES_S = 3600.0


def main() -> int:
    """Run the command that ``sys.argv`` asks for; the exit code."""
    arguments = _parser().parse_args()
    try:
        return _dispatch(arguments)
    except KeyboardInterrupt:  # the second Ctrl-C: the first one ends everything in order
        print("batchmill: stopped before everything was drained", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `batchmill queues | head`: nobody reads any more
        # Python flushes stdout once more on its way out, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _dispatch(arguments: argparse.Namespace) -> int:
    if arguments.command == "oal":  # writes plain lines where rich is missing
        from batchmill.cli import oal as oal_module

        return oal_module.run(arguments.paths, arguments.sources)
    if arguments.command == "demo":  # writes plain lines as well
        return demo.run(arguments)
    if arguments.command == "ingest":  # needs no terminal
        return ingest.run(arguments)
    if arguments.command == "export":  # needs none either
        return export.run(arguments)
    if arguments.command == "config":
        return config.run(arguments)
    if arguments.command == "web":
        return web.run(arguments)
    if arguments.command == "status":
        return status.run(arguments)
    try:
        import rich  # noqa: F401 - whether it is there is the question
    except ImportError as error:
        print(
            f"batchmill {arguments.command} draws with rich, which could not be loaded ({error}).\n"
            "Install it with: pip install 'batchmill[cli]'",
            file=sys.stderr,
        )
        return 1
    if arguments.command == "queues":
        from batchmill.cli.queues import demo as queue_demo

        return queue_demo.run(arguments.seconds)
    if arguments.command == "top":
        return top.run(arguments)
    if arguments.command == "run":
        return run.run(arguments)
    return query.run(arguments) if arguments.command == "query" else stream.run(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="batchmill", description="Typed events in, metrics out.")
    parser.add_argument("--version", action="version", version=f"batchmill {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    queues = commands.add_parser(
        "queues",
        help="watch four queues of a metrics pipeline at work",
        description="Run four queues of a metrics pipeline side by side, in this process, and "
        "watch depth, throughput, drops, and thread load before and after a rebalance. "
        "Ctrl-C ends it early. The exit code is 1 if anything accepted was not consumed.",
    )
    queues.add_argument(
        "--seconds",
        type=_seconds,
        default=12.0,
        metavar="S",
        help="how long it runs (default: %(default)g)",
    )
    run.add_parser(commands)
    status.add_parser(commands)
    top.add_parser(commands)
    web.add_parser(commands)
    config.add_parser(commands)
    demo.add_parser(commands)
    _add_oal(commands)
    ingest.add_parser(commands)
    stream.add_parsers(commands)
    query.add_parser(commands)
    export.add_parser(commands)
    return parser


def _add_oal(commands: Any) -> None:
    oal = commands.add_parser("oal", help="look at scripts of the metric language")
    actions = oal.add_subparsers(dest="action", required=True, metavar="action")
    check = actions.add_parser(
        "check",
        help="print what scripts define, or all that is wrong with them",
        description="Print what scripts define and what it costs, or every error in them.",
    )
    check.add_argument("paths", nargs="+", metavar="FILE", help="a script, or a folder of *.oal")
    add_sources_option(check)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= LONGEST_QUEUES_S:  # also refuses nan
        raise argparse.ArgumentTypeError(
            f"{text!r} is not valid: it must be a number above 0, up to {LONGEST_QUEUES_S:g}"
        )
    return value
