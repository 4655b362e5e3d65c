"""The ``batchmill`` command: one module for each of its commands.

Loads without its extra, so that it can say which one is missing.
"""

from __future__ import annotations

import argparse
import os
import sys

from batchmill import __version__
from batchmill.alerts import AlertRulesError
from batchmill.cli import (
    alerts,
    demo,
    export,
    ingest,
    oal,
    pipeline,
    query,
    run,
    status,
    store,
    web,
)
from batchmill.cli.options import Parser
from batchmill.errors import BatchmillError, ConfigError, MissingExtraError
from batchmill.extras import require_extras
from batchmill.run import ConfigFileError, UnknownSettingError

_COMMANDS = {
    "run": run.run,
    "status": status.run,
    "top": status.run_top,
    "web": web.run,
    "config": run.run_config,
    "demo": demo.run,
    "oal": oal.run,
    "ingest": ingest.run,
    "pipeline": pipeline.run,
    "backfill": pipeline.run,
    "query": query.run,
    "export": export.run,
    "store": store.run,
    "alerts": alerts.run,
}
_EXTRAS: dict[str, tuple[str, ...]] = {
    "top": ("cli",),
    "pipeline": ("cli", "spark"),
    "backfill": ("cli", "spark"),
    "query": ("cli",),
}
"""The extras that commands need in any case; `run` knows more, by its settings."""
_WRONG_SETTINGS = (AlertRulesError, ConfigError, ConfigFileError, UnknownSettingError)


def main() -> int:
    """Run the command in ``sys.argv``; the exit code."""
    given = _parser().parse_args()
    # gRPC's own library writes to the standard error output, past our log, unless it is told not
    # to before it is loaded; what goes wrong is in the errors of its calls, too.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        require_extras(f"batchmill {given.command}", *_needed(given))
        return _COMMANDS[given.command](given)
    except MissingExtraError as error:
        print(error, file=sys.stderr)
        return 1
    except BatchmillError as error:
        print(f"batchmill {given.command}: {error}", file=sys.stderr)
        return 2 if isinstance(error, _WRONG_SETTINGS) else 1
    except KeyboardInterrupt:  # the second Ctrl-C: the first one ends everything in order
        print("batchmill: stopped before everything was drained", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `batchmill query | head`
        # Python flushes stdout once more on its way out, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _needed(given: argparse.Namespace) -> list[str]:
    """The extras that the command needs, all of them: whoever misses two installs them at once."""
    extras = list(_EXTRAS.get(given.command, ()))
    if str(getattr(given, "store", None)).startswith(("postgresql:", "postgres:")):
        extras.append("postgres")
    if str(getattr(given, "source", None)).startswith("kafka:"):
        extras.append("kafka")
    return extras


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="batchmill", description="Typed events in, metrics out.")
    parser.add_argument("--version", action="version", version=f"batchmill {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for command in (run, status, web, demo, oal, ingest, pipeline, query, export, alerts, store):
        command.add_parser(commands)
    return parser
