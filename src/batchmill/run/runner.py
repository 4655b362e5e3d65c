"""A whole run: starts its processes, keeps them running until Ctrl-C, and stops them in order."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchmill.alerts import DEMO_RULES
from batchmill.errors import BatchmillError, MissingExtraError
from batchmill.extras import require_extras
from batchmill.files import read_json, write_json
from batchmill.run.balance import balance, read_counted, read_sent
from batchmill.run.checks import check_ports, check_store
from batchmill.run.home import Home
from batchmill.run.screen import Screen, TableReader, draw_tables, read_tables
from batchmill.run.settings import RunSettings
from batchmill.run.signals import Signals
from batchmill.run.specs import (
    ALERTS,
    EXPORTER_PREFIX,
    WEB,
    alerts_spec,
    demo_spec,
    export_names,
    export_spec,
    ingest_spec,
    pipeline_spec,
    web_spec,
    with_ports,
)
from batchmill.run.state import read_backlog, read_state, spool_backlog
from batchmill.run.supervisor import GaveUpError, Process, RotatingLog, State, Supervisor
from batchmill.store import RetryPolicy, StoreMissingError, open_store

STATUS_S = 1.0
INGEST_END_S = 15.0
"""Its own limit for requests under way is 10."""
PIPELINE_END_S = 20.0
"""For the running batch. It can be killed at any moment: the next run repeats that batch."""
EXPORT_READ_S = 5.0
"""How long exporters may send the rest at the end; what is left waits for the next run."""
EXPORT_END_S = 15.0
"""Their own limit for requests under way is 5."""
WEB_START_S = 10.0
"""How long the first line waits for the address of the web UI."""
WEB_END_S = 10.0
"""Its own limit for requests under way is 5."""
DEMO_STARTS = 5
"""A demo is not begun if the pipeline fails to start so many times in a row."""
DEMO_END_S = 15.0
DEMO_GRACE_S = 10.0
"""How long after its end a minute of the demo is evaluated, unless it is set."""
DEMO_ALERTS_S = 30.0
"""How long the end of a demo waits until a minute is evaluated that is over."""
ALERTS_END_S = 10.0
"""Its own limit for requests under way is 5."""
DEMO_READ_S = 120.0
"""How long the end of a demo waits for all of its spans to be counted."""
_PATIENCE = RetryPolicy(give_up_after_s=5.0)


@dataclass(frozen=True)
class Demo:
    """Traffic of the simulated shop for ``seconds``, which may be infinite."""

    seconds: float
    seed: int | None = None


def run_processes(settings: RunSettings, demo: Demo | None = None) -> int:
    """Run ingest, pipeline, exporters and web UI until Ctrl-C, or until the demo is over.

    Raises before anything is started if ingest cannot listen, or a folder or the store is not
    right; what can be known without them, :func:`batchmill.run.checks.check_settings` has checked
    before. What may pass is a warning. The exit code is 0, 1 if the demo does not balance, and 130
    after a second Ctrl-C.
    """
    home = Home(Path(settings["home"]).absolute())
    home.prepare()
    limits = {"limit": settings["log_mb"] * 2**20, "files": settings["log_files"]}
    log = RotatingLog(home.log / "run.log", **limits)
    with (
        home.locked() as inherit,
        Signals() as signals,
        TableReader(home.store_url) as reader,
        Screen() as screen,
    ):
        # Only now: the processes of a killed run have ended, and do not listen any more.
        warnings = check_ports(settings) + check_store(home)
        home.bind_source(settings["kafka"])

        def say(text: str) -> None:
            log.write(text)
            screen.say(text)

        def child_log(name: str) -> RotatingLog:
            return RotatingLog(home.log / f"{name}.log", **limits)

        for warning in warnings:
            say(warning)
        with Supervisor(inherit=inherit, log=child_log, say=say) as supervisor:
            return _Run(settings, home, supervisor, signals, reader, screen, say).go(demo)


def remove_exporters(home: Home, keep: Sequence[str]) -> list[str]:
    """Remove a run's exporters from its store, but for those to ``keep``; their targets.

    Then nothing waits for them in the outbox. One that still runs, left over from a killed run, is
    removed by the next run.
    """
    from batchmill.export import ExporterInUseError, forget_exporter
    from batchmill.outbox import NoOutboxError, Outbox

    removed: list[str] = []
    try:
        outbox = Outbox.of(home.checkpoint)
        with open_store(home.store_url, retry=_PATIENCE, create=False) as store:
            for name in [known.exporter for known in store.exporters(outbox.place)]:
                target = name.removeprefix(EXPORTER_PREFIX)
                if name.startswith(EXPORTER_PREFIX) and target not in keep:
                    with contextlib.suppress(ExporterInUseError):
                        forget_exporter(store, outbox, name)
                        removed.append(target)
    except (NoOutboxError, StoreMissingError, ImportError):
        pass
    return removed


class _StopNow(Exception):
    """A second signal: do not wait for anything."""


@dataclass
class _Run:
    """One run, from its first process's start to its last one's end."""

    _settings: RunSettings
    _home: Home
    _supervisor: Supervisor
    _signals: Signals
    _reader: TableReader
    _screen: Screen
    _say: Callable[[str], None]

    def __post_init__(self) -> None:
        self._processes = self._supervisor.processes
        self._topic: str = self._settings["kafka"] or ""
        self._source = "topic" if self._topic else "spool"
        self._started = time.time()
        self._known_after = self._started
        """The pipeline's reports on a topic from before that time do not count."""
        self._state = "running"
        self._status_due_s = 0.0
        self._introduced = self._web_said = False
        self._not_shown = ""
        self._firing: dict[tuple[str, str, int], str] = {}
        """The messages of the alerts that fire, as far as they were said."""

    def go(self, demo: Demo | None) -> int:
        """Run until a signal, or until the demo is over; the exit code."""
        settings, home = self._settings, self._home
        try:
            self._supervisor.start(ingest_spec(settings, home))
            self._remove_exporters()
            self._supervisor.start(pipeline_spec(settings, home))
            targets = settings["export_to"]
            for name, target in zip(export_names(targets), targets, strict=True):
                self._supervisor.start(export_spec(settings, home, name, target))
            self._start_alerts(demo)
            self._start_web()
            if self._until(lambda: self._is_running("ingest")):
                self._await_web()
                self._introduce()
            if demo is not None:
                return self._run_demo(demo)
            self._until(lambda: False)
            self._close(settings["drain"])
            return 0
        except _StopNow:
            self._say(f"stopped at once: the next run reads what is in the {self._source}")
            return 130
        except GaveUpError as error:
            self._say(f"{error.name} {error.why}: stopping")
            self._end_all()
            raise
        finally:
            self._state = "ended"
            for process in self._processes.values():
                process.kill()
            self._write_status()
            self._screen.end_live()

    def _remove_exporters(self) -> None:
        try:
            for target in remove_exporters(self._home, self._settings["export_to"]):
                self._say(f"removed the former exporter to {target}")
        except (BatchmillError, OSError) as error:  # the pipeline will have it, too, and say more
            self._say(f"former exporters are not removed: {error}")

    def _start_alerts(self, demo: Demo | None) -> None:
        """Start the evaluation of alert rules; a demo without any has rules of its own."""
        settings = self._settings
        rules = settings["alerts"] or (None if demo is None else str(DEMO_RULES))
        if rules is None:
            return
        quick = demo is not None and settings.is_default("alerts_grace")
        grace_s = DEMO_GRACE_S if quick else settings["alerts_grace"]
        self._supervisor.start(alerts_spec(settings, self._home, rules, grace_s))

    def _await_alerts(self) -> None:
        """Wait until a minute of the demo that is over was evaluated, if that is soon."""
        if ALERTS not in self._processes:
            return
        deadline = time.monotonic() + DEMO_ALERTS_S

        def is_evaluated() -> bool:
            due_s = (read_json(self._home.alerts) or {}).get("next_due_s")
            is_soon = due_s is not None and due_s < DEMO_ALERTS_S
            return time.monotonic() > deadline or (self._is_read() and not is_soon)

        self._until(is_evaluated)

    def _say_alerts(self) -> None:
        """Say which alerts have begun to fire, and which are resolved."""
        if ALERTS not in self._processes:
            return
        report = read_json(self._home.alerts) or {}
        if "alerts" not in report or report.get("pid") != self._processes[ALERTS].pid:
            return
        firing = {
            (alert["rule"], alert["entity_name"], alert["since_s"]): alert["message"]
            for alert in report["alerts"]
        }
        for key, message in firing.items():
            if key not in self._firing:
                self._say(f"alert {key[0]} fires: {message}")
        for key in self._firing.keys() - firing.keys():
            self._say(f"alert {key[0]} is resolved: {key[1]}")
        self._firing = firing

    def _start_web(self) -> None:
        if not self._settings["web"]:
            return
        try:
            require_extras("the web server", "web")
        except MissingExtraError as error:
            self._say(f"web UI disabled: {error}")
        else:
            self._supervisor.start(web_spec(self._settings, self._home))

    def _await_web(self) -> None:
        """Wait until the web UI listens, or cannot, or takes too long."""
        web, deadline = self._processes.get(WEB), time.monotonic() + WEB_START_S
        if web is not None:
            self._until(lambda: web.state is not State.STARTING or time.monotonic() > deadline)

    def _run_demo(self, demo: Demo) -> int:
        """Send the demo's traffic, then compare what was sent with what was counted."""
        pipeline = self._processes["pipeline"]

        def is_decided() -> bool:
            return pipeline.failed_starts >= DEMO_STARTS or (
                pipeline.state is State.RUNNING and self._is_read()
            )

        if not self._until(is_decided) or pipeline.state is not State.RUNNING:
            if not self._signals.count:
                self._say(f"no demo: the pipeline does not start ({pipeline.reason})")
            self._close(self._settings["drain"])
            return 0 if self._signals.count else 1
        before, ingest = read_counted(self._home.store_url), read_json(self._home.ingest) or {}
        http = str(ingest.get("http", ""))
        spec = demo_spec(self._settings, http, demo.seconds, demo.seed)
        traffic = self._supervisor.start(spec)
        if self._until(lambda: traffic.state is State.ENDED):
            self._say("the demo's traffic is over: the pipeline reads the rest")
            self._await_alerts()
        else:
            traffic.terminate()
            self._until_closed(lambda: traffic.state is State.ENDED, DEMO_END_S)
        self._close(self._settings["drain"] if self._signals.count else DEMO_READ_S)
        received, now = None, read_json(self._home.ingest) or {}
        same = [now.get(key) == ingest.get(key) for key in ("pid", "restarts")]
        if ingest and all(same):  # else it was restarted at 0, or the last second is missing
            received = now.get("acknowledged_spans", 0) - ingest.get("acknowledged_spans", 0)
        counted = read_counted(self._home.store_url).since(before)
        result = balance(read_sent(traffic.lines), counted, received)
        self._screen.end_live()
        self._show_tables()
        self._say(result.text)
        if result.equal:
            return 0
        if not self._is_read():
            self._say(f"the {self._source} is not empty: the next run counts the rest")
        for line in traffic.lines if traffic.code else ():
            self._say(f"  demo: {line}")
        return 1

    def _close(self, drain_s: float) -> None:
        """Stop in order: ingest, and the pipeline once it has read the rest; then the others."""
        self._state = "stopping"
        if self._signals.count:
            self._say(
                f"stopping: ingest finishes its requests, the pipeline reads the {self._source} "
                f"for {drain_s:g} s at most; Ctrl-C again stops at once"
            )
        self._end("ingest", INGEST_END_S)
        self._known_after = time.time()
        if self._processes["pipeline"].state is not State.STARTING:
            self._until_closed(self._is_read, drain_s)
        self._end("pipeline", PIPELINE_END_S)
        self._end_exporters()
        if ALERTS in self._processes:
            self._end(ALERTS, ALERTS_END_S)
        # The web UI last, so that the end can be watched.
        if WEB in self._processes:
            self._end(WEB, WEB_END_S)
        progress = read_json(self._home.progress) or {}
        backlog = read_backlog(self._home, progress, time.time(), self._topic)
        if backlog.count:
            self._say(f"{backlog.text} left in the {self._source} for the next run")
        elif self._topic and not self._is_read():
            self._say("the next run reads what is left in the topic; how much is not known")
        self._say("stopped")

    def _end_exporters(self) -> None:
        names = export_names(self._settings["export_to"])
        since = time.time()

        def is_sent(name: str) -> bool:
            """Whether its report is newer than ``since`` and nothing waits for it."""
            report = read_json(self._home.export(name)) or {}
            # Before the pipeline has made an outbox, the exporter knows of no files.
            files = report.get("waiting", {"files": 0})["files"]
            return bool(report.get("written_at", 0.0) > since and not files)

        self._until_closed(lambda: all(map(is_sent, names)), EXPORT_READ_S)
        for name in names:
            self._processes[name].terminate()
        for name in names:
            self._end(name, EXPORT_END_S)

    def _end_all(self) -> None:
        """After a failure: give the other processes a moment to end."""

        def is_over(process: Process) -> bool:
            return process.state in (State.ENDED, State.FAILED)

        for process in self._processes.values():
            process.terminate()
        with contextlib.suppress(_StopNow, GaveUpError):
            self._until_closed(lambda: all(map(is_over, self._processes.values())), INGEST_END_S)

    def _end(self, name: str, seconds: float) -> None:
        process = self._processes[name]
        process.terminate()
        if not self._until_closed(lambda: process.state is State.ENDED, seconds):
            self._say(f"{name} did not end within {seconds:g} s: killed; no data is lost by that")
            process.kill()

    def _until(self, done: Callable[[], bool]) -> bool:
        """Supervise until ``done``; False: a signal came first."""
        while not self._signals.count:
            if done():
                return True
            self._turn()
        return False

    def _until_closed(self, done: Callable[[], bool], seconds: float) -> bool:
        """The same while stopping: False after so long; only a second signal ends it early."""
        deadline = time.monotonic() + seconds
        while not done():
            if self._signals.count > 1:
                raise _StopNow
            if time.monotonic() > deadline:
                return False
            self._turn()
        return True

    def _turn(self) -> None:
        self._signals.wait()
        if self._signals.count > 1:
            raise _StopNow
        self._supervisor.poll()
        if self._introduced and (address := self._web_address()):  # it was late
            self._say(address)
        now_s = time.monotonic()
        if now_s >= self._status_due_s:
            self._status_due_s = now_s + STATUS_S
            self._write_status()
            self._say_alerts()
        if self._screen.is_due(now_s):
            try:
                self._screen.show(read_state(self._home, self._report()), self._reader.tables)
            except OSError as error:  # files that cannot be read: what runs goes on
                if str(error) != self._not_shown:
                    self._say(f"the state of the run cannot be read: {error}")
                self._not_shown = str(error)

    def _report(self) -> dict[str, Any]:
        return {
            "name": "run",
            "pid": os.getpid(),
            "state": self._state,
            "started": self._started,
            "written_at": time.time(),
            "kafka": self._topic or None,
            "processes": {name: process.report() for name, process in self._processes.items()},
        }

    def _write_status(self) -> None:
        with contextlib.suppress(OSError):  # a full disk: `status` sees how old the last one is
            write_json(self._home.supervisor, self._report())

    def _is_running(self, name: str) -> bool:
        return self._processes[name].state is State.RUNNING

    def _is_read(self) -> bool:
        """Whether the pipeline has read everything; of a topic it reports that each second."""
        if not self._topic:
            return not spool_backlog(self._home.spool).count
        report = read_json(self._home.progress) or {}
        new = float(report.get("written_at", 0.0)) > self._known_after
        return new and not report.get("unread_segments")

    def _introduce(self) -> None:
        report = read_json(self._home.ingest) or {}
        ingest = self._processes["ingest"]
        ingest.spec = with_ports(ingest.spec, report)
        scheme = "https" if self._settings["tls_cert"] else "http"
        web = self._web_address()
        self._say(
            f"OpenTelemetry: {scheme}://{report.get('http')} (HTTP), {report.get('grpc')} (gRPC); "
            f"{web and f'{web}; '}all data in {self._home.folder}"
        )
        self._introduced = True

    def _web_address(self) -> str:
        """The address of the web UI, once, as soon as it is known; else nothing."""
        web = self._processes.get(WEB)
        if self._web_said or web is None or web.state is not State.RUNNING:
            return ""
        self._web_said = True
        report = read_json(self._home.web) or {}
        web.spec = with_ports(web.spec, report)
        return f"web UI: {report.get('address')}"

    def _show_tables(self) -> None:
        with (
            contextlib.suppress(BatchmillError),
            open_store(self._home.store_url, create=False) as store,
        ):
            self._screen.print(draw_tables(read_tables(store)))
