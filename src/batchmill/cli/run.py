"""``batchmill run``: ingest and pipeline as processes of their own, watched until Ctrl-C."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from batchmill.cli import export
from batchmill.cli import web as web_module
from batchmill.cli.config import ConfigFileError, Settings, UnknownSettingError, add_options, load
from batchmill.errors import BatchmillError, ConfigError
from batchmill.run.balance import balance, read_sent
from batchmill.run.check import check
from batchmill.run.figures import (
    Picture,
    TableReader,
    Waiting,
    read_counted,
    read_tables,
    take_picture,
    waiting_in,
    what_waits,
)
from batchmill.run.home import Home, read_json, write_json
from batchmill.run.log import RotatingLog
from batchmill.run.specs import (
    RUN_EXPORTER,
    WEB,
    demo_spec,
    export_names,
    export_spec,
    ingest_spec,
    pinned,
    pipeline_spec,
    web_spec,
)
from batchmill.run.supervisor import GaveUpError, Signals, State, Supervisor
from batchmill.store import open_store

FOREVER = "forever"
LONGEST_DEMO_S = 86_400.0
STATUS_S = 1.0
INGEST_END_S = 15.0
"""Its own limit for requests under way is 10."""
PIPELINE_END_S = 20.0
"""For the running batch. It can be killed at any moment: the next run does that batch again."""
EXPORT_READ_S = 5.0
"""How long the end waits for exporters to send the rest; what is left waits for the next run."""
EXPORT_END_S = 15.0
"""Their own limit for what is in hand is 5."""
WEB_START_S = 10.0
"""How long the first line waits for the pages' address."""
WEB_END_S = 10.0
"""Its own limit for requests under way is 5."""
DEMO_END_S = 15.0
DEMO_READ_S = 120.0
"""How long the demo's end waits for all of its spans to be counted."""


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "run",
        help="receive spans and turn them into metrics: everything, in one folder",
        description="Start ingest and pipeline, restart what dies, and show what happens. Ctrl-C "
        "lets ingest finish its requests and the pipeline read the rest, then stops; a second "
        "Ctrl-C stops at once. Settings come from the options, from BATCHMILL_… variables and from "
        "batchmill.toml, in this order; `batchmill config show` tells.",
    )
    parser.add_argument(
        "--demo",
        type=_demo_seconds,
        metavar="SECONDS",
        help=f"also send the spans of a simulated shop, for so long or {FOREVER}; ends with a "
        "balance, and the exit code is 1 if it does not balance",
    )
    parser.add_argument("--demo-seed", type=int, metavar="N", help="for the same shop again")
    add_options(parser)


def run(given: argparse.Namespace) -> int:
    """Run it; the exit code."""
    try:
        settings = load(given)
        home = Home(Path(settings["home"]).absolute())
        check(settings, demo=given.demo is not None)
        home.prepare()
        return _run(settings, home, given)
    except (ConfigError, ConfigFileError, UnknownSettingError) as error:
        return _fail(error, 2)
    except BatchmillError as error:
        return _fail(error, 1)


class StopNow(Exception):
    """Somebody does not want to wait."""


def _run(settings: Settings, home: Home, given: argparse.Namespace) -> int:
    from batchmill.run.view import Screen

    limits = {"limit": settings["log_mb"] * 2**20, "files": settings["log_files"]}
    log = RotatingLog(home.log / "run.log", **limits)
    with (
        home.locked() as inherit,
        Signals() as signals,
        TableReader(home.store_url) as reader,
        Screen() as screen,
    ):
        home.belong_to(settings["kafka"])

        def say(text: str) -> None:
            log.write(text)
            screen.say(text)

        def child_log(name: str) -> RotatingLog:
            return RotatingLog(home.log / f"{name}.log", **limits)

        with Supervisor(inherit=inherit, log=child_log, say=say) as supervisor:
            going = Run(settings, home, supervisor, signals, reader, screen, say)
            return going.go(given.demo, given.demo_seed)


class Run:
    """One run, from the first start to the last end."""

    def __init__(
        self,
        settings: Settings,
        home: Home,
        supervisor: Supervisor,
        signals: Signals,
        reader: TableReader,
        screen: Any,
        say: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._home = home
        self._supervisor = supervisor
        self._signals = signals
        self._reader = reader
        self._screen = screen
        self._say = say
        self._topic: str = settings["kafka"] or ""
        self._place = "topic" if self._topic else "spool"
        self._started = time.time()
        self._known_after = self._started
        """What the pipeline told of a topic before that does not count."""
        self._state = "running"
        self._status_due_s = 0.0
        self._introduced = self._pages_told = False

    def go(self, demo: float | None, seed: int | None) -> int:
        """Run until somebody asks for the end, or the demo is over; the exit code."""
        try:
            self._supervisor.start(ingest_spec(self._settings, self._home))
            self._forget_exporters()
            self._supervisor.start(pipeline_spec(self._settings, self._home))
            self._start_exporters()
            self._start_web()
            if self._until(self._is_ready("ingest")):
                self._await_web()
                self._introduce()
            if demo is not None:
                return self._demo(demo, seed)
            self._until(lambda: False)
            self._close(self._settings["drain"])
            return 0
        except StopNow:
            self._say(f"stopped at once: what is in the {self._place} is read by the next run")
            return 130
        except GaveUpError as error:
            self._say(f"{error.name} {error.why}: stopping")
            self._end_all()
            raise
        finally:
            self._state = "ended"
            for each in self._supervisor.processes.values():
                each.kill()
            self._write_status()
            self._screen.end_live()

    def _forget_exporters(self) -> None:
        """Those that an earlier run had, and this one has not: nothing is to wait for them."""
        wanted = [f"{RUN_EXPORTER}{each}" for each in self._settings["export_to"]]
        try:
            for each in export.forget_others(self._home, RUN_EXPORTER, wanted):
                self._say(f"nothing waits any more for {each.removeprefix(RUN_EXPORTER)}")
        except BatchmillError as error:  # the pipeline will say more of it
            self._say(f"former exporters are not forgotten: {error}")

    def _start_exporters(self) -> None:
        targets = self._settings["export_to"]
        for name, target in zip(export_names(targets), targets, strict=True):
            self._supervisor.start(export_spec(self._settings, self._home, name, target))

    def _start_web(self) -> None:
        if not self._settings["web"]:
            return
        if lacking := web_module.missing():
            self._say(f"no pages to look at: {lacking}. All else goes on")
            return
        self._supervisor.start(web_spec(self._settings, self._home))

    def _await_web(self) -> None:
        """Until the pages have an address, or will have none."""
        web, deadline = self._supervisor.processes.get(WEB), time.monotonic() + WEB_START_S
        if web is not None:
            self._until(lambda: web.state is not State.STARTING or time.monotonic() > deadline)

    def _demo(self, seconds: float, seed: int | None) -> int:
        """The demo's traffic, then the balance."""
        began = self._until(lambda: self._is_ready("pipeline")() and self._is_read())
        code = 0
        if began:
            before, received = read_counted(self._home.store_url), self._received()
            http = str((read_json(self._home.ingest) or {}).get("http", ""))
            demo = self._supervisor.start(demo_spec(self._settings, http, seconds, seed))
            if not self._until(lambda: demo.state is State.ENDED):
                demo.terminate()
                self._until_over(lambda: demo.state is State.ENDED, DEMO_END_S)
            else:
                self._say("the demo's traffic is over: the pipeline reads the rest")
        asked = bool(self._signals.count)
        self._close(self._settings["drain"] if asked else DEMO_READ_S)
        if not began:
            return 0
        now = self._received()
        meanwhile = None if now is None or received is None else now[1] - received[1]
        if now is not None and received is not None and now[0] != received[0]:
            meanwhile = None  # it was started again, and counts from 0
        counted = read_counted(self._home.store_url)
        account = balance(read_sent(demo.lines), counted.since(before), meanwhile)
        self._screen.end_live()
        self._show_tables()
        self._say(account.text)
        if not account.whole:
            code = 1
            if not self._is_read():
                self._say(f"the {self._place} has more: the next run counts it")
            for line in demo.lines if demo.code else ():
                self._say(f"  demo: {line}")
        return code

    def _close(self, drain_s: float) -> None:
        """The end in order: nothing more comes in, what is in is read, nothing runs any more."""
        self._state = "stopping"
        processes = self._supervisor.processes
        if self._signals.count:
            self._say(
                f"stopping: ingest finishes its requests, the pipeline reads the {self._place} for "
                f"{drain_s:g} s at most; Ctrl-C again stops at once"
            )
        processes["ingest"].terminate()
        self._end("ingest", INGEST_END_S)
        self._known_after = time.time()
        if processes["pipeline"].state is not State.STARTING:
            self._until_over(self._is_read, drain_s)
        processes["pipeline"].terminate()
        self._end("pipeline", PIPELINE_END_S)
        self._end_exporters()
        self._end_web()
        left = self._waiting()
        if left.segments:
            self._say(f"{left.text} stay in the {self._place}: the next run reads them")
        elif self._topic and not self._is_read():
            self._say("what is left in the topic is not known: the next run reads it")
        self._say("stopped")

    def _end_web(self) -> None:
        """Last, so that the end can be watched."""
        web = self._supervisor.processes.get(WEB)
        if web is not None and web.state is not State.FAILED:
            web.terminate()
            self._end(WEB, WEB_END_S)

    def _end_exporters(self) -> None:
        names = export_names(self._settings["export_to"])
        if not names:
            return
        since = time.time()
        self._until_over(
            lambda: all(self._is_exported(each, since) for each in names), EXPORT_READ_S
        )
        for each in names:
            self._supervisor.processes[each].terminate()
        for each in names:
            self._end(each, EXPORT_END_S)

    def _is_exported(self, name: str, since: float) -> bool:
        """Whether an exporter has told, after that time, that nothing waits for it."""
        told = read_json(self._home.export(name)) or {}
        # Where the pipeline has not made an outbox yet, the exporter knows of none.
        files = told.get("waiting", {"files": 0})["files"]
        return bool(told.get("written_at", 0.0) > since and not files)

    def _end_all(self) -> None:
        """After a failure: give the others a moment, and no more."""
        for each in self._supervisor.processes.values():
            each.terminate()
        with contextlib.suppress(StopNow, GaveUpError):
            self._until_over(
                lambda: all(
                    each.state in (State.ENDED, State.FAILED)
                    for each in self._supervisor.processes.values()
                ),
                INGEST_END_S,
            )

    def _end(self, name: str, seconds: float) -> None:
        process = self._supervisor.processes[name]
        if not self._until_over(lambda: process.state is State.ENDED, seconds):
            self._say(f"{name} did not end within {seconds:g} s: killed; nothing is lost by that")
            process.kill()

    def _until(self, done: Callable[[], bool]) -> bool:
        """Let things go on until ``done``; False: somebody asked for the end before."""
        while not self._signals.count:
            if done():
                return True
            self._turn()
        return False

    def _until_over(self, done: Callable[[], bool], seconds: float) -> bool:
        """The same on the way out: only a second signal counts, and so does time."""
        deadline = time.monotonic() + seconds
        while not done():
            if self._signals.count > 1:
                raise StopNow
            if time.monotonic() > deadline:
                return False
            self._turn()
        return True

    def _turn(self) -> None:
        self._signals.wait()
        if self._signals.count > 1:
            raise StopNow
        self._supervisor.look()
        if self._introduced and (pages := self._pages()):  # it took longer than that
            self._say(pages)
        now_s = time.monotonic()
        if now_s >= self._status_due_s:
            self._status_due_s = now_s + STATUS_S
            self._write_status()
        if self._screen.is_due(now_s):
            self._screen.show(self._picture())

    def _picture(self) -> Picture:
        return take_picture(self._home, self._processes(), self._reader.tables, self._topic)

    def _processes(self) -> dict[str, dict[str, Any]]:
        return {name: each.figures() for name, each in self._supervisor.processes.items()}

    def _write_status(self) -> None:
        content = {
            "name": "run",
            "pid": os.getpid(),
            "state": self._state,
            "started": self._started,
            "written_at": time.time(),
            "kafka": self._topic or None,
            "processes": self._processes(),
        }
        with contextlib.suppress(OSError):  # a full disk: `status` sees how old the last one is
            write_json(self._home.supervisor, content)

    def _is_ready(self, name: str) -> Callable[[], bool]:
        return lambda: self._supervisor.processes[name].state is State.RUNNING

    def _is_read(self) -> bool:
        """Whether nothing waits any more; of a topic the pipeline tells, each second."""
        if not self._topic:
            return not waiting_in(self._home.spool).segments
        told = read_json(self._home.progress) or {}
        new = float(told.get("written_at", 0.0)) > self._known_after
        return new and not told.get("unread_segments")

    def _waiting(self) -> Waiting:
        progress = read_json(self._home.progress) or {}
        return what_waits(self._home, progress, time.time(), self._topic)

    def _received(self) -> tuple[int, int] | None:
        """Which life of ingest it is, and what that has acknowledged."""
        found = read_json(self._home.ingest)
        if found is None:
            return None
        return int(found.get("pid", 0)), int(found.get("acknowledged_spans", 0))

    def _introduce(self) -> None:
        found = read_json(self._home.ingest) or {}
        ingest = self._supervisor.processes["ingest"]
        ingest.spec = pinned(ingest.spec, found)
        scheme = "https" if self._settings["tls_cert"] else "http"
        pages = self._pages()
        self._say(
            f"OpenTelemetry: {scheme}://{found.get('http')} (HTTP), {found.get('grpc')} (gRPC); "
            f"{pages and f'{pages}; '}everything is kept in {self._home.folder}"
        )
        self._introduced = True

    def _pages(self) -> str:
        """Where to look, once: when that is known."""
        web = self._supervisor.processes.get(WEB)
        if self._pages_told or web is None or web.state is not State.RUNNING:
            return ""
        self._pages_told = True
        found = read_json(self._home.web) or {}
        web.spec = pinned(web.spec, found)
        return f"to look at: {found.get('address')}"

    def _show_tables(self) -> None:
        from batchmill.run.view import tables  # takes rich

        with (
            contextlib.suppress(BatchmillError),
            open_store(self._home.store_url, create=False) as store,
        ):
            self._screen.print(tables(read_tables(store)))


def _demo_seconds(text: str) -> float:
    if text == FOREVER:
        return math.inf
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= LONGEST_DEMO_S:  # also refuses nan
        raise argparse.ArgumentTypeError(
            f"{text!r} is not valid: it must be a number above 0, up to {LONGEST_DEMO_S:g}, "
            f"or {FOREVER}"
        )
    return value


def _fail(error: BatchmillError, code: int) -> int:
    print(f"batchmill run: {error}", file=sys.stderr)
    return code
