"""``batchmill web``: the pages and the JSON API, run from the command line."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchmill.cli import config, ingest, status
from batchmill.errors import BatchmillError, ConfigError, MissingExtraError
from batchmill.extras import require_extra
from batchmill.run.home import Home, write_json

if TYPE_CHECKING:
    from batchmill.web import WebServer

PORT = 8080
STATUS_S = 1.0
FRESH_S = 0.5
"""Whoever asks for the pipeline within this time gets the same answer."""
_NEEDED = ("starlette", "uvicorn")


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "web",
        help="look at the metrics of a store, and at a run, in a browser",
        description="Serve the pages and the JSON API of a store. With --home also the pipeline "
        "page of that run; `batchmill run` does this by itself. Ctrl-C or SIGTERM ends it.",
    )
    add = parser.add_argument
    add("--store", metavar="URL", help="the store (default: that of --home)")
    add("--home", metavar="PATH", help="the folder of a run (default: as for `run`)")
    add("--config", metavar="FILE", help="where `home` is set (default: ./batchmill.toml)")
    add("--bind", default="127.0.0.1", metavar="HOST", help="listen here (default: %(default)s)")
    add("--port", type=int, default=PORT, metavar="P", help="0: any free (default: %(default)s)")
    add(
        "--token",
        metavar="T",
        help="who asks for data must show it; better in a file, or in "
        f"{ingest.TOKEN_VARIABLE}: others on this machine can see command lines",
    )
    add("--token-file", type=Path, metavar="FILE", help="a file with the token")
    add("--tls-cert", type=Path, metavar="FILE", help="the server's certificate, PEM")
    add("--tls-key", type=Path, metavar="FILE", help="its key, PEM")
    add("--tls-client-ca", type=Path, metavar="FILE", help="browsers must show a certificate of it")
    add("--insecure", action="store_true", help="let everybody look who can reach --bind")
    add("--status", type=Path, metavar="FILE", help="tell there each second how it is doing")
    add("--verbose", action="store_true", help="say more")


def run(given: argparse.Namespace) -> int:
    """Run the command; the exit code."""
    level = logging.INFO if given.verbose else logging.WARNING
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=level)
    try:
        server = _server(given)
        asyncio.run(_serve(server, Telling(given.status)))
    except ConfigError as error:
        print(f"batchmill web: {error}", file=sys.stderr)
        if error.field == "port":
            print(
                "Choose another with --port, for a run with --web-port or web_port in "
                f"{config.FILE}; 0 is any that is free",
                file=sys.stderr,
            )
        return 2
    except (BatchmillError, OSError) as error:
        print(f"batchmill web: {error}", file=sys.stderr)
        return 1
    print("ended", flush=True)
    return 0


def missing() -> str:
    """What to do about what is not installed; empty: all is there."""
    try:
        require_extra("the web server", "web", *_NEEDED)
    except MissingExtraError as error:
        return str(error)
    return ""


class Pipeline:
    """The pipeline page's JSON, from the folder of a run; any thread may ask.

    However many look, the folder is looked at twice a second at most.
    """

    def __init__(self, home: Home, clock: Callable[[], float] = time.monotonic) -> None:
        self._home = home
        self._clock = clock
        self._lock = threading.Lock()
        self._found: Mapping[str, Any] = {}
        self._looked_s = float("-inf")

    def __call__(self) -> Mapping[str, Any]:
        """What ``batchmill status --json`` prints."""
        with self._lock:
            if self._clock() - self._looked_s >= FRESH_S:
                seen = status.look(self._home)
                self._found = status.as_json(self._home, seen, status.health(seen))
                self._looked_s = self._clock()
            return self._found


class Telling:
    """Says in a file where the server is, and each second that it is there."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._started = time.time()

    def write(self, address: str, state: str = "serving") -> None:
        """Say it; a disk that is full stops nobody."""
        if self._path is None:
            return
        content = {
            "name": "web",
            "pid": os.getpid(),
            "state": state,
            "address": address,
            "started": self._started,
            "written_at": time.time(),
        }
        with contextlib.suppress(OSError):
            write_json(self._path, content)


def _server(given: argparse.Namespace) -> WebServer:
    from batchmill.http import Access
    from batchmill.web import WebServer, WebSettings

    settings = WebSettings(
        bind=given.bind,
        port=given.port,
        access=Access(
            token=ingest.token_of(given),
            tls_cert=given.tls_cert,
            tls_key=given.tls_key,
            client_ca=given.tls_client_ca,
        ),
        insecure=given.insecure,
    )
    home = None
    if given.home or not given.store:
        found = config.load(argparse.Namespace(config=given.config, home=given.home))
        home = Home(Path(found["home"]).absolute())
    store = given.store
    if store is None:
        assert home is not None
        store = home.store_url
    return WebServer(store, settings, pipeline=None if home is None else Pipeline(home))


async def _serve(server: WebServer, telling: Telling) -> None:
    loop = asyncio.get_running_loop()
    asked: list[int] = []

    def note(number: int) -> None:
        if asked and number == signal.SIGINT:
            os._exit(130)
        asked.append(number)
        server.stop()

    for each in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(each, note, each)

    async def report() -> None:
        while True:
            await asyncio.to_thread(telling.write, server.address)
            await asyncio.sleep(STATUS_S)

    reporting: list[asyncio.Task[None]] = []

    def ready() -> None:
        print(f"serving {server.address}; Ctrl-C ends it", flush=True)
        reporting.append(asyncio.create_task(report()))

    try:
        await server.serve(ready)
    finally:
        for task in reporting:
            task.cancel()
            await asyncio.wait({task})
    telling.write(server.address, "ended")
