"""The ``batchmill`` command.

Loads without its extra, so that it can say which one is missing.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from batchmill import __version__
from batchmill.cli import config, demo, export, ingest, query, run, status, stream, top, web
from batchmill.cli.sources import add_sources_option


def main() -> int:
    """Run the command that ``sys.argv`` asks for; the exit code."""
    arguments = _parser().parse_args()
    try:
        return _dispatch(arguments)
    except KeyboardInterrupt:  # the second Ctrl-C: the first one ends everything in order
        print("batchmill: stopped before everything was drained", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `batchmill query | head`
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
    if arguments.command == "top":
        return top.run(arguments)
    if arguments.command == "run":
        return run.run(arguments)
    return query.run(arguments) if arguments.command == "query" else stream.run(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="batchmill", description="Typed events in, metrics out.")
    parser.add_argument("--version", action="version", version=f"batchmill {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
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
