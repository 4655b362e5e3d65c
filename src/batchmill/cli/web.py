"""``batchmill web``: serves the web UI and the JSON API."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchmill.cli.options import Options, access_of, add_access_options, add_home_options, home_of
from batchmill.errors import BatchmillError, ConfigError
from batchmill.logs import configure_logs
from batchmill.process_stats import ProcessStats
from batchmill.run import StatusFile, StatusReader, serve_until_signal

if TYPE_CHECKING:
    from batchmill.web import WebServer

PORT = 8080
STATUS_S = 1.0


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "web",
        help="serve the web UI of a store, and of a run",
        description="Serve the web UI and the JSON API of a store. With --home also the pipeline "
        "page of that run; `batchmill run` does this by itself. Ctrl-C or SIGTERM ends it.",
    )
    add = Options(parser)
    add.value("--store", "URL", "the store (default: that of --home)")
    add_home_options(parser)
    add.value("--bind", "HOST", "listen here (default: %(default)s)", default="127.0.0.1")
    add.value("--port", "P", "0: any free (default: %(default)s)", type=int, default=PORT)
    add_access_options(parser, "browsers")
    add.switch("--keep-names", "the pipeline leaves ids in names of spans, too")
    add.value("--status", "FILE", "report there each second how it is doing", type=Path)
    add.switch("--verbose", "log more")


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal; the exit code."""
    configure_logs(verbose=arguments.verbose)
    try:
        asyncio.run(_serve(_server(arguments), StatusFile(arguments.status, "web")))
    except ConfigError as error:
        print(f"batchmill web: {_explain(error)}", file=sys.stderr)
        return 2
    except (BatchmillError, OSError) as error:
        print(f"batchmill web: {error}", file=sys.stderr)
        return 1
    print("ended", flush=True)
    return 0


def _explain(error: ConfigError) -> str:
    if error.field != "port":
        return str(error)
    cause = error.__cause__
    in_use = isinstance(cause, OSError) and cause.errno == errno.EADDRINUSE
    why = f"port {error.value} is in use" if in_use else str(error)
    return f"{why} (set web_port, or --port of batchmill web)"


def _server(arguments: argparse.Namespace) -> WebServer:
    from batchmill.web import WebServer, WebSettings

    settings = WebSettings(
        bind=arguments.bind,
        port=arguments.port,
        access=access_of(arguments),
        insecure=arguments.insecure,
    )
    if arguments.store and not arguments.home:
        return WebServer(arguments.store, settings)
    home = home_of(arguments)
    return WebServer(
        arguments.store or home.store_url,
        settings,
        run=StatusReader(home),
        traces=home.traces,
        normalise_names=not arguments.keep_names,
    )


async def _serve(server: WebServer, status: StatusFile) -> None:
    stopped = asyncio.Event()

    process = ProcessStats()

    def write() -> None:
        status.write({"state": "serving", "address": server.address, **process.report()})

    async def report() -> None:
        while not stopped.is_set():
            await asyncio.to_thread(write)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STATUS_S):
                    await stopped.wait()

    reports: list[asyncio.Task[None]] = []

    def ready() -> None:
        print(f"serving {server.address}; Ctrl-C ends it", flush=True)
        reports.append(asyncio.create_task(report()))

    try:
        await serve_until_signal(server, ready)
    finally:
        stopped.set()
        await asyncio.gather(*reports)  # its last write comes before ours
    status.write({"state": "ended", "address": server.address})
