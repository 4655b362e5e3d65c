"""The state of a run, read from the files in its home folder and from the system's processes.

Each process writes a report once a second; whoever reads them needs no connection to any process.
:mod:`batchmill.run.status` says whether a state is healthy.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchmill.files import read_json, write_json
from batchmill.run.home import Home
from batchmill.store import ClockState
from batchmill.wording import count_of, duration

NOT_RESPONDING_S = 5.0
"""A process reports every second: one whose report is older than this does not respond."""
PIPELINE_STALE_S = 30.0
"""The pipeline reports beside its batches, but waits for the store."""
GONE_S = 60.0
"""After so long, the process id in a report may be that of another process."""
BEHIND_S = 15.0
"""What waits is a backlog if the oldest segment waits for longer."""
LONG_BATCH_S, LONG_BATCH_TIMES = 60.0, 5
"""A batch that has been running for longer, and for more than so many times as long as usual, may
hang."""
_PROC = Path("/proc")
_STOPPED = ("T", "t")
"""The states of a process that is stopped: by SIGSTOP or a frozen terminal, or by a debugger."""

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


@dataclass(frozen=True)
class LongBatch:
    """A batch that runs for far longer than usual; whether it will end cannot be known."""

    batch: int
    seconds: float
    """For how long it has been running."""
    usual_s: float
    """How long a batch usually takes."""

    @property
    def text(self) -> str:
        """In one line."""
        return f"batch {self.batch:,} has been running for {duration(self.seconds)}"


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
    def long_batch(self) -> LongBatch | None:
        """The batch that runs, if it takes far longer than usual; the pipeline reports meanwhile.

        None if it does not report: then that is what is wrong.
        """
        running = self.progress.get("running")
        silent_s = max(0.0, self.now - float(self.progress.get("written_at", 0.0)))
        ends = self.supervised and self.state_of("pipeline") not in ("running", "stopping")
        if not running or ends or silent_s > PIPELINE_STALE_S or "pipeline" in self.stopped:
            return None
        seconds, usual_s = float(running["seconds"]) + silent_s, float(running["usual_s"])
        if seconds <= max(LONG_BATCH_S, LONG_BATCH_TIMES * usual_s):
            return None
        return LongBatch(int(running["batch"]), round(seconds, 3), usual_s)

    @property
    def clock_doubts(self) -> list[str]:
        """What looks wrong with a clock."""
        doubts = ClockState(**(self.progress.get("clock") or {})).doubts(self.now)
        if hours := int((self.progress.get("kept") or {}).get("held_back", 0)):
            doubts.append(
                f"kept spans of {count_of(hours, 'hour')} are too old by that clock, and are held "
                "back as well"
            )
        return doubts

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
        add("kept spans", (self.progress.get("kept") or {}).get("dropped", {}))
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


def stopped_processes(leaders: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Of process groups, by name, the processes that are stopped; ``leaders`` have their ids.

    A group is a process of a run with what it has started: a JVM may be stopped alone. Empty where
    the system has no ``/proc``.
    """
    names = {pid: name for name, pid in leaders.items()}
    stopped: dict[str, tuple[int, ...]] = {}
    for stat in _PROC.glob("[0-9]*/stat") if names else ():
        try:
            # The name of the program, in brackets, may have any character.
            state, _, group = stat.read_bytes().rpartition(b")")[2].split()[:3]
        except (OSError, ValueError):  # it has ended
            continue
        pid = int(stat.parent.name)
        name = names.get(pid) or names.get(int(group))
        if name is not None and state.decode() in _STOPPED:
            stopped[name] = (*stopped.get(name, ()), pid)
    return stopped


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
