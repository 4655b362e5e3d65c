"""Whether a run is healthy, why not, and its status as text and as JSON.

A status is computed from a :class:`~batchmill.run.state.RunState` alone.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from batchmill.export import reads_store
from batchmill.run.home import Home
from batchmill.run.state import Backlog, Behind, LongBatch, Report, RunState, read_state
from batchmill.wording import count_of, duration

STALE_S = 10.0
"""A supervisor or a topic whose report is older than this has a problem."""
LAG_S = 60.0
"""Degraded if the oldest segment waits for longer."""
FRESH_S = 0.5
"""How long a :class:`StatusReader` gives the same answer."""
_PRESSURE = ("CRITICAL", "CRITICAL_PLUS")


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
            "long_batch": None if state.long_batch is None else _long_batch_json(state.long_batch),
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
    """A parent that had too many new entities in the last hour."""
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
    if (long := state.long_batch) is not None:
        degraded.append(
            f"{long.text}, usually {duration(long.usual_s)}: it hangs, the store does not answer, "
            "or it is far too slow"
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
    if (long := state.long_batch) is not None:
        return f"it waits for batch {long.batch:,}"
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
    """Pages that are missing, exporters and receivers of alerts that get nothing through, rules."""
    reports = {"pipeline": state.progress, **state.exports, "alerts": state.alerts}
    faults = [
        f"{name} has {why}"
        for name, report in reports.items()
        if (why := report.get("page_fault")) and state.state_of(name) == "running"
    ]
    faults += [
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


def _long_batch_json(long: LongBatch) -> dict[str, Any]:
    return {**asdict(long), "text": long.text}


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
