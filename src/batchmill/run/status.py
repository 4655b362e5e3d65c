"""The state of a run, read from the files in its home folder, and whether it is healthy.

Each process writes a report once a second; whoever reads them needs no connection to any process.
"""

from __future__ import annotations

import contextlib
import enum
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from batchmill.export import reads_store
from batchmill.files import read_json, write_json
from batchmill.run.home import Home
from batchmill.run.stopped import stopped_processes
from batchmill.store import ClockState
from batchmill.wording import count_of

STALE_S = 10.0
"""A supervisor or a topic whose report is older than this has a problem."""
NOT_RESPONDING_S = 5.0
"""A process reports every second: one whose report is older than this does not respond."""
PIPELINE_STALE_S = 30.0
"""The pipeline reports beside its batches, but waits for the store."""
GONE_S = 60.0
"""After so long, the process id in a report may be that of another process."""
LAG_S = 60.0
"""Degraded if the oldest segment waits for longer."""
BEHIND_S = 15.0
"""What waits is a backlog if the oldest segment waits for longer."""
FRESH_S = 0.5
"""How long a :class:`StatusReader` gives the same answer."""
_PRESSURE = ("CRITICAL", "CRITICAL_PLUS")

Report = Mapping[str, Any]
"""The content of a process's file; empty if there is none."""


class StatusFile:
    """The file in which a process reports how it is doing."""

    def __init__(self, path: Path | None, name: str, **fixed: Any) -> None:
        """Report to ``path``, None: nowhere; ``fixed`` is in every report."""
        self._path = path
        self._fixed = {"name": name, "pid": os.getpid(), "started": time.time(), **fixed}

    def write(self, report: Report) -> None:
        """Replace the report; a full disk does not stop the process."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                write_json(self._path, {**self._fixed, **report, "written_at": time.time()})


@dataclass(frozen=True)
class Backlog:
    """What was acknowledged and is in no commit: segments of a spool, or messages of a topic."""

    count: int = 0
    bytes: int = 0
    """0 for a topic, which does not say."""
    oldest_s: float = 0.0
    topic: str = ""
    """The topic's address; empty: it is a spool."""
    age_s: float | None = 0.0
    """How old this information is; None: the pipeline has not reported yet."""
    rows: int = 0
    """How many rows the segments have, about."""

    @property
    def text(self) -> str:
        """The count and its noun."""
        if self.age_s is None:
            return "not known yet"
        return count_of(self.count, "message" if self.topic else "segment")


def spool_backlog(spool: Path) -> Backlog:
    """The segments in a spool."""
    from batchmill.spool import unread

    segments = unread(spool)
    return Backlog(segments.segments, segments.bytes, segments.oldest_s, rows=segments.rows)


def topic_backlog(progress: Report, now: float) -> Backlog | None:
    """The messages in a topic by the pipeline's report; None: the pipeline reads a spool.

    Only the pipeline asks the broker: whoever reads a status needs no login there.
    """
    topic = str(progress.get("source", ""))
    if not topic.startswith("kafka://"):
        return None
    age_s = max(0.0, now - float(progress.get("written_at", 0.0)))
    count = int(progress.get("unread_segments", 0))
    # What waited then has waited ever since, as far as is known.
    oldest_s = float(progress.get("lag_s", 0.0)) + age_s if count else 0.0
    return Backlog(count, 0, oldest_s, topic, age_s)


def read_backlog(home: Home, progress: Report, now: float, topic: str = "") -> Backlog:
    """What waits for the pipeline; with ``topic`` in that topic, even before any report."""
    backlog = topic_backlog(progress, now)
    if backlog is not None:
        return backlog
    return Backlog(topic=topic, age_s=None) if topic else spool_backlog(home.spool)


@dataclass(frozen=True)
class Behind:
    """How far a pipeline is behind."""

    rows: int
    """Spans, or messages of a topic."""
    unit: str
    catch_up_s: float | None
    """How long the rest will take at the pace of the last batches; None: not known."""
    new_lag_s: float | None
    """How long what is new waits until it is committed; None: not known."""

    @property
    def text(self) -> str:
        """In one line."""
        text = f"behind by {count_of(self.rows, self.unit)}"
        if self.catch_up_s is not None:
            minutes = round(self.catch_up_s / 60)
            text += f", about {count_of(minutes, 'minute')}" if minutes else ", less than a minute"
        if self.new_lag_s is not None:
            text += f"; what is new waits for {self.new_lag_s:.0f} s"
        return text


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The reports of a run's processes at one moment."""

    now: float
    """In seconds since 1970."""
    supervised: bool = False
    """Whether a supervisor is running."""
    supervisor: Report = field(default_factory=dict)
    ingest: Report = field(default_factory=dict)
    ingest_alive: bool = False
    """Whether the process of ingest's report exists."""
    ingest_silent_s: float = 0.0
    """The age of ingest's report."""
    progress: Report = field(default_factory=dict)
    """The pipeline's report."""
    backlog: Backlog = Backlog()
    exports: Mapping[str, Report] = field(default_factory=dict)
    """The report of each exporter, by its name as a process."""
    web: Report = field(default_factory=dict)
    alerts: Report = field(default_factory=dict)
    """The report of the process that evaluates alert rules."""
    stopped: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The ids of the processes that are stopped (SIGSTOP), by the name of theirs in the run."""

    @property
    def processes(self) -> Mapping[str, Report]:
        """The supervisor's entry for each process; none without a supervisor."""
        return self.supervisor.get("processes", {}) if self.supervised else {}

    @property
    def behind(self) -> Behind | None:
        """How far the pipeline is behind; None if there is no backlog."""
        backlog, progress = self.backlog, self.progress
        if backlog.oldest_s <= BEHIND_S:
            return None
        reported = self.now - float(progress.get("written_at", 0.0)) < GONE_S
        return Behind(
            backlog.count if backlog.topic else backlog.rows,
            "message" if backlog.topic else "span",
            progress.get("catch_up_s") if reported else None,
            progress.get("new_lag_s") if reported else None,
        )

    @property
    def clock_doubts(self) -> list[str]:
        """What looks wrong with a clock."""
        return ClockState(**(self.progress.get("clock") or {})).doubts(self.now)

    def state_of(self, name: str) -> str:
        """The state of a process; empty if there is none of that name."""
        return str(self.processes.get(name, {}).get("state", ""))

    def trouble_of(self, name: str) -> str:
        """What is wrong with a process that runs: it is stopped, or does not respond; else empty.

        One that does not respond does not report, though the system lets it run.
        """
        if pids := self.stopped.get(name):
            numbers = " ".join(map(str, pids))
            return f"{name} is stopped (SIGSTOP): `kill -CONT {numbers}` lets it go on"
        reports = {
            "pipeline": self.progress,
            "web": self.web,
            "alerts": self.alerts,
            **self.exports,
        }
        silent_s = self.now - float(reports.get(name, {}).get("written_at", self.now))
        if name == "ingest":
            silent_s = self.ingest_silent_s
        # One that starts has the report of the process before it.
        if self.state_of(name) != "running" and (self.supervised or name != "ingest"):
            return ""
        if silent_s > (PIPELINE_STALE_S if name == "pipeline" else NOT_RESPONDING_S):
            return f"{name} is not responding: it has not reported for {silent_s:.0f} s"
        return ""

    def shown_state(self, name: str) -> str:
        """The state of a process as people should see it: one that runs may not respond."""
        if name in self.stopped:
            return "stopped"
        return "not responding" if self.trouble_of(name) else self.state_of(name)

    def drops(self) -> dict[str, dict[str, int]]:
        """All that was refused, dropped or left out, by what it was and by reason."""
        drops: dict[str, dict[str, int]] = {}

        def add(what: str, reasons: Mapping[str, int]) -> None:
            for reason, count in reasons.items():
                if count:
                    counts = drops.setdefault(what, {})
                    counts[str(reason)] = counts.get(str(reason), 0) + int(count)

        add("rejected spans", self.ingest.get("rejected", {}))
        add("refused requests", self.ingest.get("refused_requests", {}))
        add("discarded requests", self.ingest.get("discarded_requests", {}))
        for signal, report in self.ingest.get("forwarded", {}).items():
            add(f"{signal} not handed on", report.get("dropped", {}))
        for report in self.exports.values():
            add("exported values", report.get("dropped", {}))
        add("notifications of alerts", self.alerts.get("dropped", {}))
        for what, reasons in self.progress.get("left_out", {}).items():
            add(str(what), reasons)
        return drops

    def queues(self) -> list[dict[str, Any]]:
        """Every queue, micro-batcher and flow dispatcher of the processes that run."""
        return self._components("queues")

    def levels(self) -> list[dict[str, Any]]:
        """The thresholds of all their depths; the measures of ingest's sink are not among them."""
        return self._components("levels")

    def _components(self, key: str) -> list[dict[str, Any]]:
        """What the processes that run report under a key, each with its process."""
        reports: dict[str, Report] = {"ingest": self.ingest} if self.ingest_alive else {}
        others = {"pipeline": self.progress, **self.exports, "web": self.web, "alerts": self.alerts}
        for name, report in others.items():
            if self.state_of(name) in ("running", "stopping"):
                reports[name] = report
        return [
            {"process": name, **component}
            for name, report in reports.items()
            for component in report.get(key, ())
        ]


def read_state(home: Home, supervisor: Report | None = None) -> RunState:
    """The state of a run now; ``supervisor`` is its own report, if it is the one that asks."""
    now, supervised = time.time(), supervisor is not None or home.is_locked()
    if supervisor is None:
        supervisor = read_json(home.supervisor) or {}
    processes = supervisor.get("processes", {}) if supervised else {}
    topic = str(supervisor.get("kafka") or "") if supervised else ""
    ingest, progress = read_json(home.ingest) or {}, read_json(home.progress) or {}
    try:
        silent_s = now - home.ingest.stat().st_mtime
    except OSError:
        silent_s = 0.0
    return RunState(
        now=now,
        supervised=supervised,
        supervisor=supervisor,
        ingest=ingest,
        ingest_alive=silent_s < GONE_S and _is_alive(ingest.get("pid")),
        ingest_silent_s=silent_s,
        progress=progress,
        backlog=read_backlog(home, progress, now, topic),
        exports={
            name: read_json(home.export(name)) or {}
            for name in processes
            if name.startswith("export")
        },
        web=(read_json(home.web) or {}) if "web" in processes else {},
        alerts=(read_json(home.alerts) or {}) if "alerts" in processes else {},
        stopped=stopped_processes(_pids(supervisor if supervised else {}, ingest)),
    )


def _pids(supervisor: Report, ingest: Report) -> dict[str, int]:
    """The ids of a run's processes, by name."""
    pids = {"the supervisor": supervisor.get("pid")}
    pids |= {name: known.get("pid") for name, known in supervisor.get("processes", {}).items()}
    pids.setdefault("ingest", ingest.get("pid"))
    for number, worker in enumerate(ingest.get("workers", ()), 1):
        pids[f"worker {number} of ingest"] = worker.get("pid")
    return {name: pid for name, pid in pids.items() if pid}


class Health(enum.IntEnum):
    """How a run is doing; the values are the exit codes of ``batchmill status``."""

    HEALTHY = 0
    DEGRADED = 1
    """What was acknowledged is safe, but something is wrong."""
    DOWN = 2
    """No spans are received."""


@dataclass(frozen=True)
class RunStatus:
    """The state of a run, and whether it is healthy."""

    home: Path
    state: RunState
    health: Health
    reasons: tuple[str, ...] = ()
    """Why it is not healthy."""

    def as_json(self) -> dict[str, Any]:
        """What ``batchmill status --json`` prints and ``/api/v1/pipeline`` answers."""
        state = self.state
        supervisor = {key: value for key, value in state.supervisor.items() if key != "processes"}
        return {
            "health": self.health.name.lower(),
            "reasons": list(self.reasons),
            "home": str(self.home),
            "at": state.now,
            "supervisor": supervisor if state.supervised else None,
            "processes": {
                name: {**process, "state": state.shown_state(name)}
                for name, process in state.processes.items()
            },
            "queue_rows": state.ingest.get("queue_rows", 0) if state.ingest_alive else 0,
            **_backlog_json(state.backlog),
            "lag_s": round(state.backlog.oldest_s, 3),
            "behind": None if state.behind is None else _behind_json(state.behind),
            "last_batch": state.progress.get("last_batch"),
            "committed_at": state.progress.get("committed_at"),
            "drops": state.drops(),
            "thresholds": state.ingest.get("thresholds") if state.ingest_alive else None,
            "queues": state.queues(),
            "levels": state.levels(),
            "web": state.web.get("address"),
            "batches": list(state.progress.get("batches", ())),
            "exports": {name: _rest(report) for name, report in state.exports.items()},
            "alerts": _rest(state.alerts) if "alerts" in state.processes else None,
            "ingest": _rest(state.ingest),
            "pipeline": _rest(state.progress),
        }

    def lines(self) -> list[str]:
        """What ``batchmill status`` prints."""
        state, now = self.state, self.state.now
        lines = [f"{self.health.name.lower()}: {self.home}"]
        lines += [f"  ! {reason}" for reason in self.reasons]
        lines += [_process_line(state, name) for name in state.processes]
        ingest, progress, backlog = state.ingest, state.progress, state.backlog
        if ingest:
            lines.append(
                f"received   {count_of(ingest.get('received_spans', 0), 'span')}, "
                f"{ingest.get('acknowledged_spans', 0):,} acknowledged, "
                f"level {ingest.get('level', 'NORMAL')}"
            )
        if workers := ingest.get("workers"):
            restarts = count_of(ingest.get("restarts", 0), "restart")
            lines.append(f"workers    {count_of(len(workers), 'process', 'processes')}, {restarts}")
        queued = ingest.get("queue_rows", 0) if state.ingest_alive else 0
        lines.append(f"queue      {count_of(queued, 'span')}")
        lines += [_flows_line(queue) for queue in state.queues() if queue.get("flows")]
        lines += [_level_line(level) for level in state.levels() if level.get("level") != "NORMAL"]
        lag = f"lag {backlog.oldest_s:.1f} s"
        if backlog.topic:
            lines.append(f"topic      {backlog.topic}: {backlog.text}; {lag}")
        else:
            lines.append(f"spool      {backlog.text}, {count_of(backlog.bytes, 'byte')}; {lag}")
        if state.behind is not None:
            lines.append(f"backlog    {state.behind.text}")
        if progress.get("last_batch") is None:
            lines.append("committed  nothing yet")
        else:
            at = progress.get("committed_at")
            ago = "" if at is None else f", {duration(now - at)} ago"
            lines.append(
                f"committed  batch {progress['last_batch']:,}{ago}; "
                f"{count_of(progress.get('spans', 0), 'span')} counted"
            )
        for name, report in state.exports.items():
            lines.append(f"{name:<10} {export_text(report, now) or 'no report yet'}")
        if "alerts" in state.processes:
            lines.append(f"alerts     {alerts_text(state.alerts) or 'no report yet'}")
        lines += [_overflow_line(offender) for offender in progress.get("overflow", ())]
        for what, reasons in state.drops().items():
            lines += [f"dropped    {n:,} {what}: {reason}" for reason, n in reasons.items()]
        return lines


def _overflow_line(offender: Report) -> str:
    """Of what there were too many new entities in the last hour."""
    names, rows = int(offender["names"]), int(offender["rows"])
    return (
        f"overflow   too many {offender['parent']} ({offender['source']}): "
        f"{count_of(names, 'new name')}, {count_of(rows, 'row')}, such as {offender['example']}"
    )


def read_status(home: Home, max_lag_s: float = LAG_S) -> RunStatus:
    """The status of a run now; degraded also if its oldest segment waits for ``max_lag_s``."""
    return assess(home, read_state(home), max_lag_s)


def assess(home: Home, state: RunState, max_lag_s: float = LAG_S) -> RunStatus:
    """Whether a state is healthy, and why not."""
    if not state.supervised and not state.ingest_alive:
        return RunStatus(home.folder, state, Health.DOWN, ("nothing runs: start `batchmill run`",))
    down, degraded = _process_faults(state)
    if trouble := state.trouble_of("ingest"):
        down.append(trouble)
    others = {**state.processes, **state.stopped}
    degraded += [text for name in others if name != "ingest" and (text := state.trouble_of(name))]
    if state.ingest_alive:
        degraded += [
            f"worker {number} of ingest is {worker['state']}"
            for number, worker in enumerate(state.ingest.get("workers", ()), 1)
            if worker.get("state") != "running"
        ]
    level = state.ingest.get("level", "NORMAL")
    if level in _PRESSURE:
        degraded.append(f"senders are told to wait: pressure is {level}")
    backlog = state.backlog
    if backlog.topic and state.supervised and (backlog.age_s or 0.0) > STALE_S:
        degraded.append(
            f"the pipeline has not reported for {backlog.age_s:.0f} s what waits in "
            f"{backlog.topic}: it does not run, or the broker does not answer"
        )
    if backlog.oldest_s > max_lag_s:
        degraded.append(
            f"the oldest {'message' if backlog.topic else 'segment'} has waited for "
            f"{backlog.oldest_s:.0f} s: {_why_behind(state)}"
        )
    degraded += _report_faults(state, max_lag_s)
    degraded += state.clock_doubts
    health = Health.DOWN if down else Health.DEGRADED if degraded else Health.HEALTHY
    return RunStatus(home.folder, state, health, (*down, *degraded))


def _why_behind(state: RunState) -> str:
    """Why something waits for long."""
    if trouble := state.trouble_of("pipeline"):
        return trouble
    if state.supervised and state.state_of("pipeline") != "running":
        return "the pipeline does not run"
    if (behind := state.behind) is not None and behind.catch_up_s is not None:
        return behind.text
    return "the pipeline is slow" if state.supervised else "the pipeline is slow, or does not run"


def _process_faults(state: RunState) -> tuple[list[str], list[str]]:
    """What the supervisor reports, by what it means: down, or degraded."""
    down: list[str] = []
    degraded: list[str] = []
    if not state.supervised:
        return down, degraded
    age_s = state.now - float(state.supervisor.get("written_at", 0.0))
    if age_s > STALE_S:
        degraded.append(f"the supervisor has not reported for {age_s:.0f} s")
    if state.supervisor.get("state") == "stopping":
        degraded.append("the run is being stopped")
    for name, process in state.processes.items():
        is_in = process.get("state")
        if is_in == "running" or (name == "demo" and is_in != "failed"):
            continue
        why = f"{name} is {is_in}"
        if process.get("reason"):
            why += f": {process['reason']}"
        elif process.get("exit"):
            why += f" (it last ended with {process['exit']})"
        (down if name == "ingest" and is_in != "starting" else degraded).append(why)
    return down, degraded


def _report_faults(state: RunState, max_lag_s: float) -> list[str]:
    """Exporters that send nothing, receivers of alerts that take nothing, rules that fail."""
    faults = [
        f"the alert rule {rule} cannot be evaluated: {why}"
        for rule, why in state.alerts.get("faults", {}).items()
    ]
    if why := state.alerts.get("rules_fault"):
        faults.append(f"the changed alert rules cannot be used, and the former ones stay: {why}")
    if float(state.alerts.get("failing_s", 0.0)) > max_lag_s:
        faults += [
            f"alerts: {receiver} accepts no notification ({why}); they wait in the store"
            for receiver, why in state.alerts.get("failing", {}).items()
        ]
    for name, report in state.exports.items():
        if float(report.get("failing_s", 0.0)) > max_lag_s:
            target = str(report.get("target"))
            faults.append(
                f"{name}: {target} has accepted nothing for {report['failing_s']:.0f} s "
                f"({report.get('failing')}); values wait in the "
                f"{'store' if reads_store(target) else 'outbox'}"
            )
    return faults


class StatusReader:
    """Reads the status of a run, at most twice a second however many threads ask."""

    def __init__(self, home: Home, clock: Callable[[], float] = time.monotonic) -> None:
        self._home = home
        self._clock = clock
        self._lock = threading.Lock()
        self._status: RunStatus | None = None
        self._read_s = 0.0

    def read(self) -> RunStatus:
        """The status of the run, at most half a second old."""
        with self._lock:
            if self._status is None or self._clock() - self._read_s >= FRESH_S:
                self._status = read_status(self._home)
                self._read_s = self._clock()
            return self._status


def export_text(report: Report | None, now: float) -> str:
    """An exporter's report in one line; empty if there is none."""
    if not report:
        return ""
    target, waiting = report.get("target"), report.get("waiting") or {}
    if "scrapes" in report:
        return f"{count_of(report['scrapes'], 'scrape')} of {target}"
    text = f"{count_of(report.get('sent_values', 0), 'value')} sent to {target}"
    if files := waiting.get("files"):
        oldest_s = now - (waiting.get("oldest_ms") or now * 1000) / 1000
        text += f"; {count_of(files, 'file')} waiting, the oldest for {max(0.0, oldest_s):.0f} s"
    dropped = sum((report.get("dropped") or {}).values())
    text += f"; {dropped:,} dropped" if dropped else ""
    return text + (f"; failing: {report['failing']}" if report.get("failing") else "")


def alerts_text(report: Report | None) -> str:
    """The report of the alerting process in one line; empty if there is none."""
    if not report or "firing" not in report:
        return ""
    text = f"{report['firing']:,} firing, {report.get('pending', 0):,} pending"
    text += f", of {count_of(report.get('rules', 0), 'rule')}"
    if sent := sum((report.get("sent") or {}).values()):
        text += f"; {count_of(sent, 'notification')} sent"
    if waiting := sum((report.get("waiting") or {}).values()):
        text += f"; {waiting:,} waiting"
    for receiver, why in (report.get("failing") or {}).items():
        text += f"; failing: {receiver} ({why})"
    return text


def duration(seconds: float) -> str:
    """A duration in its largest useful unit.

    >>> duration(7.4), duration(200), duration(90_000)
    ('7 s', '3 min', '25 h')
    """
    if seconds < 120:
        return f"{max(0.0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def _process_line(state: RunState, name: str) -> str:
    process = state.processes[name]
    text = f"{name:<10} {state.shown_state(name)}"
    if process.get("pid"):
        started = float(process.get("started") or state.now)
        text += f", process {process['pid']} for {duration(state.now - started)}"
    if restarts := process.get("restarts"):
        text += f", {count_of(restarts, 'restart')} (last ended with {process.get('exit')})"
    if name == "web" and process.get("state") == "running" and state.web.get("address"):
        text += f": {state.web['address']}"
    return text


def _flows_line(queue: Report) -> str:
    flows = queue["flows"]
    return (
        f"flows      {queue['process']}/{queue['name']}: {flows.get('active', 0):,} active, "
        f"{flows.get('assigned', 0):,} assigned, {flows.get('completed', 0):,} completed; "
        f"{count_of(queue.get('depth', 0), 'signal')} waiting"
    )


def _level_line(level: Report) -> str:
    return (
        f"level      {level['process']}/{level['name']}: {level['level']}, "
        f"depth {level.get('value', 0):,} of {level.get('critical', 0):,}"
    )


def _rest(report: Report) -> dict[str, Any]:
    """A report without what the JSON has at its top."""
    at_top = ("queues", "levels", "thresholds", "batches")
    return {key: value for key, value in report.items() if key not in at_top}


def _behind_json(behind: Behind) -> dict[str, Any]:
    return {**asdict(behind), "text": behind.text}


def _backlog_json(backlog: Backlog) -> dict[str, Any]:
    if not backlog.topic:
        return {"spool": {"segments": backlog.count, "bytes": backlog.bytes}}
    known = backlog.age_s is not None
    return {
        "topic": {
            "address": backlog.topic,
            "messages": backlog.count if known else None,
            "told_s": round(backlog.age_s or 0.0, 3) if known else None,
        }
    }


def _is_alive(pid: Any) -> bool:
    if not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True
