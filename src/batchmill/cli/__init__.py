"""The ``batchmill`` command: one module for each of its commands.

Loads without its extra, so that it can say which one is missing.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from batchmill import __version__
from batchmill.cli.options import Parser
from batchmill.errors import BatchmillError, MissingExtraError
from batchmill.extras import lacks_extra, left_out, require_extras

_COMMANDS = {
    "run": ("run", "run"),
    "config": ("run", "run_config"),
    "status": ("status", "run"),
    "top": ("status", "run_top"),
    "web": ("web", "run"),
    "demo": ("demo", "run"),
    "oal": ("oal", "run"),
    "ingest": ("ingest", "run"),
    "pipeline": ("pipeline", "run"),
    "backfill": ("pipeline", "run"),
    "query": ("query", "run"),
    "export": ("export", "run"),
    "alerts": ("alerts", "run"),
    "store": ("store", "run"),
}
"""The module and the function of each command, in the order of ``batchmill --help``."""
_EXTRAS: dict[str, tuple[str, ...]] = {
    "top": ("cli",),
    "pipeline": ("cli", "spark"),
    "backfill": ("cli", "spark"),
    "query": ("cli",),
    "web": ("web",),
    "demo": ("demo",),
    "ingest": ("otlp",),
}
"""The extras that commands need in any case; `run` knows more, by its settings."""
_UNUSED = dict.fromkeys(
    ("ingest", "web", "export", "alerts", "query", "store", "demo"), ("pandas",)
)
"""Packages that commands leave out, since they run no code of their user. If it can, pyarrow
imports pandas as soon as it converts a list: 40 MB, and a third of a second at the start."""


def main() -> int:
    """Run the command in ``sys.argv``; the exit code."""
    arguments = _parser(sys.argv[1:]).parse_args()
    # gRPC's own library writes to the standard error output, past our log, unless it is told not
    # to before it is loaded; what goes wrong is in the errors of its calls, too.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        require_extras(f"batchmill {arguments.command}", *_needed(arguments))
        module, function = _COMMANDS[arguments.command]
        with left_out(*_UNUSED.get(arguments.command, ())):
            return int(getattr(_module(module), function)(arguments))
    except MissingExtraError as error:
        print(error, file=sys.stderr)
        return 1
    except BatchmillError as error:
        print(f"batchmill {arguments.command}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:  # the second Ctrl-C: the first one ends everything in order
        print("batchmill: stopped before everything was drained", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `batchmill query | head`
        # Python flushes stdout once more on its way out, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _needed(arguments: argparse.Namespace) -> list[str]:
    """The extras that the command needs, all of them: whoever misses two installs them at once."""
    extras = list(_EXTRAS.get(arguments.command, ()))
    if str(getattr(arguments, "store", None)).startswith(("postgresql:", "postgres:")):
        extras.append("postgres")
    addresses = (
        ("to", "export_traces", "export_logs") if arguments.command == "ingest" else ("source",)
    )
    if any(str(getattr(arguments, name, None)).startswith("kafka:") for name in addresses):
        extras.append("kafka")
    if arguments.command == "export":
        from batchmill.export import require_exporter

        if lacks_extra(lambda: require_exporter(arguments.to)):
            extras.append("export")
    if arguments.command == "alerts" and arguments.action != "list":
        from batchmill.alerts import load_rules

        file = arguments.file if arguments.action == "check" else arguments.rules
        if lacks_extra(lambda: load_rules(file)):
            extras.append("alerts")
    return extras


def _parser(words: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The parser of the command that ``words`` begins with; else of all commands.

    So a command that needs little starts quickly: the modules of the others are not loaded.
    """
    parser = Parser(prog="batchmill", description="Typed events in, metrics out.")
    parser.add_argument("--version", action="version", version=f"batchmill {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    named = words[:1] if words and words[0] in _COMMANDS else _COMMANDS
    for name in dict.fromkeys(_COMMANDS[command][0] for command in named):
        _module(name).add_parser(commands)
    return parser


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"batchmill.cli.{name}")
