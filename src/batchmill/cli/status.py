"""``batchmill status``: how a run is doing; the exit code tells a monitor."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchmill.cli import config, prometheus
from batchmill.errors import BatchmillError
from batchmill.run.figures import Picture, Tables, Waiting, exported, take_picture
from batchmill.run.home import Home, read_json

HEALTHY, DEGRADED, DOWN = 0, 1, 2
WORDS = ("healthy", "degraded", "down")
STALE_S = 10.0
"""What a process tells each second is not to be older than this."""
GONE_S = 60.0
LAG_S = 60.0
"""The oldest segment is not to wait longer than this."""
PRESSURE = ("CRITICAL", "CRITICAL_PLUS")


@dataclass(frozen=True)
class Health:
    """The verdict, and all that speaks against health."""

    code: int
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class Seen:
    """What there is to judge."""

    picture: Picture
    supervisor: Mapping[str, Any] = field(default_factory=dict)
    """What the supervisor tells; empty: nothing."""
    supervised: bool = False
    """Whether a supervisor is there."""
    ingest_alive: bool = False
    """Whether the process that ingest told of is there."""
    ingest_silent_s: float = 0.0
    """How long it has not told anything."""


def health(seen: Seen, lag_s: float = LAG_S) -> Health:
    """Down: nothing is taken in. Degraded: what is taken in is safe, but something is not right."""
    picture = seen.picture
    down: list[str] = []
    weak: list[str] = []
    if not seen.supervised and not seen.ingest_alive:
        return Health(DOWN, ("nothing runs: start `batchmill run`",))
    if seen.supervised:
        age = picture.now - float(seen.supervisor.get("written_at", 0.0))
        if age > STALE_S:
            weak.append(f"the supervisor has said nothing for {age:.0f} s")
        if seen.supervisor.get("state") == "stopping":
            weak.append("it is being stopped")
        for name, each in picture.processes.items():
            state = each.get("state")
            if state == "running" or (name == "demo" and state != "failed"):
                continue
            why = f"{name} is {state}"
            why += f" (its last end: {each['exit']})" if each.get("exit") else ""
            (down if name == "ingest" and state != "starting" else weak).append(why)
    if seen.ingest_silent_s > STALE_S:
        weak.append(f"ingest has said nothing for {seen.ingest_silent_s:.0f} s")
    level = picture.ingest.get("level", "NORMAL")
    if level in PRESSURE:
        weak.append(f"senders are told to wait: pressure is {level}")
    waiting = picture.waiting
    if waiting.topic and seen.supervised and (waiting.told_s or 0.0) > STALE_S:
        weak.append(
            f"the pipeline has not told for {waiting.told_s:.0f} s what waits in {waiting.topic}: "
            "it does not run, or the broker does not answer"
        )
    if waiting.oldest_s > lag_s:
        weak.append(
            f"the oldest {'message' if waiting.topic else 'segment'} has waited for "
            f"{waiting.oldest_s:.0f} s: the pipeline does not keep up, or does not run"
        )
    for name, told in picture.exports.items():
        silent_s = picture.now - float(told.get("written_at", picture.now))
        if silent_s > STALE_S:
            weak.append(f"{name} has said nothing for {silent_s:.0f} s")
        if float(told.get("failing_s", 0.0)) > lag_s:
            weak.append(
                f"{name}: {told.get('target')} has taken nothing for {told['failing_s']:.0f} s "
                f"({told.get('failing')}); what is to be sent waits in the "
                f"{'store' if prometheus.takes(str(told.get('target'))) else 'outbox'}"
            )
    silent_s = picture.now - float(picture.web.get("written_at", picture.now))
    if silent_s > STALE_S and picture.processes.get("web", {}).get("state") == "running":
        weak.append(f"web has said nothing for {silent_s:.0f} s")
    if down:
        return Health(DOWN, (*down, *weak))
    return Health(DEGRADED, tuple(weak)) if weak else Health(HEALTHY)


def drops(picture: Picture) -> dict[str, dict[str, int]]:
    """All that was not counted or not taken, by what became of it and the reason."""
    found: dict[str, dict[str, int]] = {}
    for what, key in (("rejected spans", "rejected"), ("refused requests", "refused_requests")):
        if reasons := {str(k): int(n) for k, n in picture.ingest.get(key, {}).items() if n}:
            found[what] = reasons
    for signal, told in picture.ingest.get("forwarded", {}).items():
        if reasons := {str(k): int(n) for k, n in told.get("dropped", {}).items() if n}:
            found[f"{signal} not handed on"] = reasons
    for told in picture.exports.values():
        for reason, n in told.get("dropped", {}).items():
            kept = found.setdefault("exported values", {})
            kept[str(reason)] = kept.get(str(reason), 0) + int(n)
    for what, reasons in picture.progress.get("left_out", {}).items():
        if kept := {str(k): int(n) for k, n in reasons.items() if n}:
            found[str(what)] = kept
    return found


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "status",
        help="how `batchmill run` is doing",
        description="Tell of each process, queue, spool, lag, last commit, and what was dropped "
        "and why. The exit code is 0 if all is well, 1 if something is not right, 2 if nothing is "
        "taken in.",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument(
        "--max-lag", type=float, default=LAG_S, metavar="S", help="degraded beyond (default: 60)"
    )
    parser.add_argument("--home", metavar="PATH", help="of the run (default: as for `run`)")
    parser.add_argument("--config", metavar="FILE", help="settings (default: ./batchmill.toml)")


def run(given: argparse.Namespace) -> int:
    """Tell; the exit code."""
    try:
        settings = config.load(given)
    except BatchmillError as error:
        print(f"batchmill status: {error}", file=sys.stderr)
        return DOWN
    home = Home(Path(settings["home"]).absolute())
    seen = look(home)
    verdict = health(seen, given.max_lag)
    if given.json:
        print(json.dumps(as_json(home, seen, verdict), ensure_ascii=False))
    else:
        for line in lines(home, seen, verdict):
            print(line)
    return verdict.code


def look(home: Home) -> Seen:
    """What the folder of a run shows now."""
    supervisor = read_json(home.supervisor) or {}
    supervised = home.is_locked()
    processes = supervisor.get("processes", {}) if supervised else {}
    topic = str(supervisor.get("kafka") or "") if supervised else ""
    picture = take_picture(home, processes, Tables(), topic)
    try:
        silent_s = picture.now - home.ingest.stat().st_mtime
    except OSError:
        silent_s = 0.0
    # After so long without a word, the number is somebody else's by now.
    alive = silent_s < GONE_S and _is_alive(picture.ingest.get("pid"))
    return Seen(picture, supervisor, supervised, alive, silent_s)


def as_json(home: Home, seen: Seen, verdict: Health) -> dict[str, Any]:
    """All of it, for programs."""
    picture = seen.picture
    return {
        "health": WORDS[verdict.code],
        "reasons": list(verdict.reasons),
        "home": str(home.folder),
        "at": picture.now,
        "supervisor": {k: v for k, v in seen.supervisor.items() if k != "processes"}
        if seen.supervised
        else None,
        "processes": dict(picture.processes),
        "queue_rows": picture.ingest.get("queue_rows", 0) if seen.ingest_alive else 0,
        **_between(picture.waiting),
        "lag_s": round(picture.waiting.oldest_s, 3),
        "last_batch": picture.progress.get("last_batch"),
        "committed_at": picture.progress.get("committed_at"),
        "drops": drops(picture),
        "thresholds": picture.ingest.get("thresholds") if seen.ingest_alive else None,
        "queues": queues(seen),
        "web": picture.web.get("address"),
        "batches": list(picture.progress.get("batches", ())),
        "exports": {name: _rest(told) for name, told in picture.exports.items()},
        "ingest": _rest(picture.ingest),
        "pipeline": _rest(picture.progress),
    }


_TOLD_APART = ("queues", "thresholds", "batches")


def _rest(told: Mapping[str, Any]) -> dict[str, Any]:
    """What a process tells, but for what stands at the top of the JSON already."""
    return {key: each for key, each in told.items() if key not in _TOLD_APART}


def queues(seen: Seen) -> list[dict[str, Any]]:
    """Every queue and micro-batcher of the processes that are there, each with its process."""
    picture = seen.picture
    told: dict[str, Mapping[str, Any]] = {"ingest": picture.ingest if seen.ingest_alive else {}}
    if seen.supervised:
        told |= {"pipeline": picture.progress, **picture.exports}
    alive = [name for name in told if name == "ingest" or _is_up(picture, name)]
    return [{"process": name, **each} for name in alive for each in told[name].get("queues", ())]


def _is_up(picture: Picture, name: str) -> bool:
    return picture.processes.get(name, {}).get("state") in ("running", "stopping")


def lines(home: Home, seen: Seen, verdict: Health) -> list[str]:
    """All of it, for people."""
    picture, now = seen.picture, seen.picture.now
    told = [f"{WORDS[verdict.code]}: {home.folder}"]
    told += [f"  ! {each}" for each in verdict.reasons]
    for name, each in picture.processes.items():
        text = f"{name:<10} {each.get('state')}"
        if each.get("pid"):
            text += f", process {each['pid']} for {_span(now - float(each.get('started') or now))}"
        if each.get("restarts"):
            text += f", started again {each['restarts']} times (last end: {each.get('exit')})"
        if name == "web" and each.get("state") == "running" and picture.web.get("address"):
            text += f": {picture.web['address']}"
        told.append(text)
    ingest, progress, waiting = picture.ingest, picture.progress, picture.waiting
    if ingest:
        told.append(
            f"received   {ingest.get('received_spans', 0):,} spans, "
            f"{ingest.get('acknowledged_spans', 0):,} acknowledged, "
            f"level {ingest.get('level', 'NORMAL')}"
        )
    told.append(f"queue      {ingest.get('queue_rows', 0) if seen.ingest_alive else 0:,} spans")
    if waiting.topic:
        told.append(f"topic      {waiting.topic}: {waiting.text}; lag {waiting.oldest_s:.1f} s")
    else:
        told.append(
            f"spool      {waiting.text}, {waiting.bytes:,} bytes; lag {waiting.oldest_s:.1f} s"
        )
    if progress.get("last_batch") is None:
        told.append("committed  nothing yet")
    else:
        at = progress.get("committed_at")
        ago = "" if at is None else f", {_span(now - at)} ago"
        told.append(
            f"committed  batch {progress['last_batch']:,}{ago}; "
            f"{progress.get('spans', 0):,} spans counted"
        )
    for name, each in picture.exports.items():
        told.append(f"{name:<10} {exported(now, each) or 'has said nothing yet'}")
    for what, reasons in drops(picture).items():
        told += [f"dropped    {n:,} {what}: {reason}" for reason, n in reasons.items()]
    return told


def _between(waiting: Waiting) -> dict[str, Any]:
    if not waiting.topic:
        return {"spool": {"segments": waiting.segments, "bytes": waiting.bytes}}
    known = waiting.told_s is not None
    told_s = round(waiting.told_s or 0.0, 3) if known else None
    messages = waiting.segments if known else None
    return {"topic": {"address": waiting.topic, "messages": messages, "told_s": told_s}}


def _span(seconds: float) -> str:
    """A time that people can read.

    >>> _span(7.4), _span(200), _span(90_000)
    ('7 s', '3 min', '25 h')
    """
    if seconds < 120:
        return f"{max(0.0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def _is_alive(pid: Any) -> bool:
    if not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        return True
    return True
