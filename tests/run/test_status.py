"""The status of a run, the balance of a demo, and the display: what they make of reports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from batchmill.cli import main
from batchmill.files import write_json
from batchmill.run import Backlog, Health, Home, RunState, assess
from batchmill.run.balance import CommittedSpans, Sent, balance, counted_of, read_sent
from batchmill.run.screen import (
    STATEMENTS,
    ServiceRow,
    Tables,
    draw,
    plain_line,
    read_tables,
    service_rows,
)
from batchmill.run.state import stopped_processes
from batchmill.run.status import FRESH_S, StatusReader
from batchmill.sources import Grain, bucket_start
from batchmill.store import TopNRow, Value, open_store
from tests.kit.ingest import ingest
from tests.kit.processes import pause_process
from tests.kit.stores import MINUTE, Measurement, Writer
from tests.kit.threads import until

NOW = 1_000_000.0
DAY_S = 86_400.0
EARLIER, BEFORE = 202403011158, 202403011159
RUNNING = {"ingest": {"state": "running"}, "pipeline": {"state": "running"}}


def run_state(processes: dict[str, Any] = RUNNING, **changes: Any) -> RunState:
    """A healthy run, but for ``changes``."""
    report = {"written_at": NOW - 1} | changes.pop("supervisor", {}) | {"processes": processes}
    healthy: dict[str, Any] = {"supervised": True, "ingest_alive": True}
    return RunState(now=NOW, **(healthy | {"supervisor": report} | changes))


def process(**states: str) -> dict[str, dict[str, str]]:
    """Processes that run, but for ``states``."""
    return RUNNING | {name: {"state": state, "exit": "SIGKILL"} for name, state in states.items()}


def running_for(seconds: float, usual_s: float = 10.0, age_s: float = 1.0) -> dict[str, Any]:
    """A report of the pipeline while a batch runs."""
    running = {"batch": 1812, "since": 0.0, "seconds": seconds, "usual_s": usual_s}
    return {"written_at": NOW - age_s, "last_batch": 1811, "running": running}


@pytest.mark.parametrize(
    ("state", "health", "why"),
    [
        (run_state(), Health.HEALTHY, ""),
        (run_state(processes=process(demo="ended")), Health.HEALTHY, ""),
        (
            run_state(processes=process(pipeline="restarting")),
            Health.DEGRADED,
            "pipeline is restarting",
        ),
        (run_state(processes=process(ingest="starting")), Health.DEGRADED, "ingest is starting"),
        (run_state(processes=process(ingest="restarting")), Health.DOWN, "SIGKILL"),
        (run_state(ingest={"level": "CRITICAL"}), Health.DEGRADED, "pressure is CRITICAL"),
        (
            run_state(ingest={"workers": [{"state": "running"}, {"state": "restarting"}]}),
            Health.DEGRADED,
            "worker 2 of ingest is restarting",
        ),
        (run_state(ingest={"workers": [{"state": "running"}] * 2}), Health.HEALTHY, ""),
        (
            run_state(progress={"clock": {"trusted_s": NOW - 40 * DAY_S, "seen_s": NOW}}),
            Health.DEGRADED,
            "expiry is held back: the clock is 40 days ahead",
        ),
        (
            run_state(progress={"clock": {"last_minute": 197002010000}}),
            Health.DEGRADED,
            "19 days ahead of the clock",
        ),
        (run_state(progress={"clock": {"trusted_s": NOW, "seen_s": NOW}}), Health.HEALTHY, ""),
        (
            run_state(progress={"kept": {"held_back": 20}}),
            Health.DEGRADED,
            "kept spans of 20 hours are too old by that clock",
        ),
        (
            run_state(progress={"page_fault": "no page for Prometheus: port 1 is taken"}),
            Health.DEGRADED,
            "pipeline has no page for Prometheus: port 1 is taken",
        ),
        (run_state(backlog=Backlog(3, 99, 61.0)), Health.DEGRADED, "waited for 61 s"),
        (run_state(backlog=Backlog(3, 99, 59.0)), Health.HEALTHY, ""),
        (run_state(supervisor={"written_at": NOW - 11}), Health.DEGRADED, "not reported for 11 s"),
        (
            run_state(supervisor={"written_at": NOW, "state": "stopping"}),
            Health.DEGRADED,
            "being stopped",
        ),
        (run_state(ingest_silent_s=6.0), Health.DOWN, "ingest is not responding: it has not"),
        (run_state(stopped={"pipeline": (7, 8)}), Health.DEGRADED, "pipeline is stopped (SIGSTOP)"),
        (run_state(stopped={"the supervisor": (7,)}), Health.DEGRADED, "`kill -CONT 7`"),
        (run_state(stopped={"worker 2 of ingest": (7,)}), Health.DEGRADED, "worker 2 of ingest is"),
        (run_state(stopped={"ingest": (7,)}), Health.DOWN, "ingest is stopped (SIGSTOP)"),
        (run_state(progress={"written_at": NOW - 31}), Health.DEGRADED, "pipeline is not"),
        (
            run_state(progress={"written_at": NOW - 1}, backlog=Backlog(3, 99, 61.0)),
            Health.DEGRADED,
            "waited for 61 s: the pipeline is slow",
        ),
        (
            run_state(processes=process(pipeline="restarting"), backlog=Backlog(3, 99, 61.0)),
            Health.DEGRADED,
            "waited for 61 s: the pipeline does not run",
        ),
        (
            run_state(progress=running_for(719.0), backlog=Backlog(3, 99, 900.0)),
            Health.DEGRADED,
            "batch 1,812 has been running for 12 min, usually 10 s: it hangs, the store does not "
            "answer, or it is far too slow the oldest segment has waited for 900 s: it waits for "
            "batch 1,812",
        ),
        (run_state(progress=running_for(59.0)), Health.HEALTHY, ""),
        (run_state(progress=running_for(149.0, usual_s=30.0)), Health.HEALTHY, ""),
        (
            run_state(progress=running_for(150.0, usual_s=30.0)),
            Health.DEGRADED,
            "batch 1,812 has been running for 3 min, usually 30 s",
        ),
        (run_state(processes=process(web="restarting")), Health.DEGRADED, "web is restarting"),
        (run_state(processes=process(web="failed")), Health.DEGRADED, "web is failed"),
        (
            run_state(
                processes=RUNNING | {"web": {"state": "running"}}, web={"written_at": NOW - 11}
            ),
            Health.DEGRADED,
            "web is not responding: it has not reported for 11 s",
        ),
        (run_state(supervised=False, ingest_alive=False), Health.DOWN, "nothing runs"),
        (run_state(supervised=False, processes={}), Health.HEALTHY, ""),
    ],
)
def test_health(state: RunState, health: Health, why: str) -> None:
    """Down: no spans are received. Degraded: something is wrong. The reasons say what."""
    status = assess(Home(Path()), state)
    assert status.health is health
    assert why in " ".join(status.reasons)
    assert bool(status.reasons) == (health is not Health.HEALTHY)


def test_a_process_that_does_not_respond_is_not_shown_as_running() -> None:
    """In the JSON that the pages show and in the lines of the command, seconds after it stopped."""
    processes = {"ingest": {"state": "running", "pid": 7}, "web": {"state": "running"}}
    state = run_state(processes, ingest_silent_s=6.0, stopped={"web": (8,)})
    status = assess(Home(Path()), state)
    shown = {name: known["state"] for name, known in status.as_json()["processes"].items()}
    assert shown == {"ingest": "not responding", "web": "stopped"}
    assert any(line.startswith("ingest     not responding, process 7") for line in status.lines())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "batch 1,812 has been running for 12 min, usually 10 s"),
        ({"stopped": {"pipeline": (7,)}}, "pipeline is stopped (SIGSTOP): `kill -CONT 7`"),
        ({"progress": running_for(700.0, age_s=31.0)}, "pipeline is not responding: it has not"),
        ({"processes": process(pipeline="restarting")}, "pipeline is restarting"),
    ],
    ids=["hung batch", "stopped", "not responding", "restarting"],
)
def test_a_batch_that_hangs_is_told_from_what_else_stops_a_pipeline(
    changes: dict[str, Any], reason: str
) -> None:
    """The last report of one that is stopped, hangs as a whole or is gone has a batch, too."""
    status = assess(Home(Path()), run_state(**({"progress": running_for(719.0)} | changes)))
    (why,) = status.reasons
    assert why.startswith(reason)
    assert (status.as_json()["long_batch"] is not None) == (not changes)


def test_a_batch_that_hangs_is_in_the_json_and_in_the_table_of_a_run() -> None:
    """The Pipeline page reads the one."""
    status = assess(Home(Path()), run_state(progress=running_for(719.0)))
    text = "batch 1,812 has been running for 12 min"
    expected = {"batch": 1812, "seconds": 720.0, "usual_s": 10.0, "text": text}
    assert status.as_json()["long_batch"] == expected
    console = Console(width=120, color_system=None)
    with console.capture() as shown:
        console.print(draw(status.state, Tables(), 0.0))
    assert f"batch 1,811; 0 spans counted; {text}" in shown.get()


def test_an_ingest_that_starts_has_an_old_report() -> None:
    """It is that of the process before it: the run is not down for that."""
    state = run_state(process(ingest="starting"), ingest_silent_s=600.0)
    assert assess(Home(Path()), state).health is Health.DEGRADED


def test_a_stopped_ingest_makes_the_command_exit_with_2(tmp_path: Path) -> None:
    """A real one: at once, and healthy again when it goes on."""
    with ingest(tmp_path / "home") as receiver:
        command = [sys.executable, "-m", "batchmill", "status", f"--home={receiver.home}"]

        def status() -> subprocess.CompletedProcess[str]:
            return subprocess.run(command, check=False, capture_output=True, text=True)

        until(lambda: status().returncode == 0, "healthy")
        pause_process(receiver.process.pid)
        try:
            stopped = status()
        finally:
            os.kill(receiver.process.pid, signal.SIGCONT)
        assert stopped.returncode == 2
        assert "ingest is stopped (SIGSTOP)" in stopped.stdout
        until(lambda: status().returncode == 0, "healthy again")


WORKING = {"written_at": NOW - 1, "catch_up_s": 250.0, "new_lag_s": 6.2}


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        (WORKING, "behind by 1,203,400 spans, about 4 minutes; what is new waits for 6 s"),
        (WORKING | {"catch_up_s": 29.0}, "behind by 1,203,400 spans, less than a minute; what"),
        (WORKING | {"catch_up_s": None, "new_lag_s": None}, "behind by 1,203,400 spans"),
        (WORKING | {"written_at": NOW - 600}, "behind by 1,203,400 spans"),  # it does not run
        ({}, "behind by 1,203,400 spans"),
    ],
)
def test_a_backlog_is_told_in_spans_and_minutes(progress: dict[str, Any], text: str) -> None:
    """On the screen, as JSON, and as the reason why the run is degraded."""
    waiting = Backlog(7_435, 2**27, 900.0, rows=1_203_400)
    status = assess(Home(Path()), run_state(backlog=waiting, progress=progress))
    assert status.health is Health.DEGRADED
    (line,) = [line for line in status.lines() if line.startswith("backlog")]
    assert line.startswith(f"backlog    {text}")
    assert status.as_json()["behind"]["text"] == line.removeprefix("backlog    ")
    hangs = progress.get("written_at") == NOW - 600
    known = progress.get("catch_up_s") is not None and not hangs
    other = "pipeline is not responding" if hangs else "the pipeline is slow"
    assert status.reasons[-1].startswith("the oldest segment has waited for 900 s: ")
    assert (text in status.reasons[-1]) == known
    assert (other in status.reasons[-1]) != known


def test_what_has_just_arrived_is_no_backlog() -> None:
    """A batch takes some seconds."""
    state = run_state(backlog=Backlog(30, 2**20, 9.0, rows=30_000), progress=WORKING)
    assert state.behind is None
    assert assess(Home(Path()), state).as_json()["behind"] is None


def test_messages_of_a_topic_may_be_a_backlog_as_well() -> None:
    """They are read in order: what is new waits, too."""
    state = run_state(backlog=Backlog(500, 0, 90.0, "kafka://b:1/t", 1.0), progress=WORKING)
    assert state.behind is not None
    assert state.behind.text.startswith("behind by 500 messages, about 4 minutes")


def test_a_stopped_process_is_told_from_one_that_runs() -> None:
    """Also if only what it has started is stopped."""
    code = "import subprocess, sys; subprocess.run(['sleep', '600'])"
    leader = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    try:
        assert stopped_processes({"a": leader.pid}) == {}
        os.kill(leader.pid, signal.SIGSTOP)
        until(lambda: stopped_processes({"a": leader.pid, "b": 1}) == {"a": (leader.pid,)})
        os.kill(leader.pid, signal.SIGCONT)
        until(lambda: stopped_processes({"a": leader.pid}) == {})
        path = Path(f"/proc/{leader.pid}/task/{leader.pid}/children")
        [child] = until(lambda: [int(pid) for pid in path.read_text().split()])
        os.kill(child, signal.SIGSTOP)
        until(lambda: stopped_processes({"a": leader.pid}) == {"a": (child,)})
    finally:
        os.killpg(leader.pid, signal.SIGKILL)
        leader.wait()


def test_drops_are_reported_by_reason() -> None:
    """Those of ingest, of the pipeline and of kept spans; what is zero is left out."""
    state = RunState(
        now=NOW,
        ingest={"rejected": {"no trace id": 3, "x": 0}, "refused_requests": {}},
        progress={
            "left_out": {"duplicates": {"same trace and span id": 2}, "expired": {}},
            "kept": {"spans": 7, "dropped": {"beyond the size limit": 5}},
        },
    )
    assert state.drops() == {
        "rejected spans": {"no trace id": 3},
        "duplicates": {"same trace and span id": 2},
        "kept spans": {"beyond the size limit": 5},
    }


def print_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *given: str
) -> tuple[int, str]:
    """Run the command; exit code and output."""
    monkeypatch.setattr(sys, "argv", ["batchmill", "status", *given])
    return main(), capsys.readouterr().out


def test_status_reads_what_a_run_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From its folder alone, while it runs, and when it does not."""
    home = Home(tmp_path / "home")
    option = f"--home={home.folder}"
    code, out = print_status(monkeypatch, capsys, option)
    assert code == Health.DOWN
    assert "nothing runs" in out
    home.prepare()
    (home.spool / "Span").mkdir()
    (home.spool / "Span" / "1.parquet").write_bytes(b"x" * 10)
    home.checkpoint.mkdir()
    now = time.time()
    progress: dict[str, Any] = {"last_batch": 4, "committed_at": now, "spans": 1234}
    offender = {"source": "Endpoint", "parent": "endpoints of shop", "names": 1, "rows": 5000}
    progress["overflow"] = [offender | {"example": "GET /x"}]
    write_json(home.progress, progress | {"left_out": {"quarantined": {"no time": 5}}})
    write_json(home.ingest, {"pid": os.getpid(), "queue_rows": 7, "level": "NORMAL"})
    processes = process() | {
        "pipeline": {
            "state": "running",
            "pid": 12,
            "started": now,
            "restarts": 2,
            "exit": "SIGKILL",
        }
    }
    write_json(home.supervisor, {"pid": 1, "written_at": now, "processes": processes})
    with home.locked():
        code, out = print_status(monkeypatch, capsys, option)
        printed = print_status(monkeypatch, capsys, option, "--json")
    assert code == Health.HEALTHY, out
    for line in (
        "2 restarts (last ended with SIGKILL)",
        "queue      7 spans",
        "1 segment, 10 bytes",
        "batch 4, 0 s ago; 1,234 spans counted",
        "dropped    5 quarantined: no time",
        "too many endpoints of shop (Endpoint): 1 new name, 5,000 rows, such as GET /x",
    ):
        assert line in out
    content = json.loads(printed[1])
    assert printed[0] == Health.HEALTHY
    assert content["health"] == "healthy"
    assert content["spool"] == {"segments": 1, "bytes": 10}
    assert content["last_batch"] == 4
    assert content["drops"] == {"quarantined": {"no time": 5}}


def queue(name: str) -> dict[str, Any]:
    """A queue as a process tells of it."""
    return {"name": name, "kind": "queue", "depth": 1, "capacity": 4}


def test_the_pipeline_page_has_its_figures(tmp_path: Path) -> None:
    """Queues by process, thresholds and batches stand at the top, and there alone."""
    processes = process() | {name: {"state": "running"} for name in ("export", "export-2")}
    processes["export-2"] = {"state": "restarting"}
    levels = {"level": "WARNING", "measures": []}
    batches = [{"batch": 7, "at": NOW, "rows": 5, "seconds": 1.0, "phases": {"commit": 1.0}}]
    state = run_state(
        processes,
        ingest={"queues": [queue("spool")], "thresholds": levels, "level": "WARNING"},
        progress={
            "batches": batches,
            "queues": [queue("jdbc")],
            "levels": [{"name": "jdbc", "level": "CRITICAL"}],
            "last_batch": 7,
        },
        exports={"export": {"queues": [queue("out")]}, "export-2": {"queues": [queue("old")]}},
    )
    page = assess(Home(tmp_path), state).as_json()
    assert [(entry["process"], entry["name"]) for entry in page["queues"]] == [
        ("ingest", "spool"),
        ("pipeline", "jdbc"),
        ("export", "out"),
    ]
    assert (page["thresholds"], page["batches"]) == (levels, batches)
    assert page["levels"] == [{"process": "pipeline", "name": "jdbc", "level": "CRITICAL"}]
    assert page["ingest"] == {"level": "WARNING"}
    assert page["pipeline"] == {"last_batch": 7}


def test_alerts_are_in_the_status(tmp_path: Path) -> None:
    """How many fire, what was sent and dropped; rules and receivers that fail degrade the run."""
    report = {
        "firing": 1,
        "pending": 2,
        "rules": 3,
        "sent": {"http://host/hook": 4},
        "waiting": {"http://host/hook": 5},
        "dropped": {"too many waiting": 6},
        "faults": {"slow": "the store has no metric x (yet)"},
        "rules_fault": "alerts.toml: there is no rule in it",
        "failing": {"http://host/hook": "HTTP 503"},
        "failing_s": 100.0,
    }
    state = run_state(process() | {"alerts": {"state": "running"}}, alerts=report)
    status = assess(Home(tmp_path), state)
    text = "1 firing, 2 pending, of 3 rules; 4 notifications sent; 5 waiting"
    assert f"alerts     {text}; failing: http://host/hook (HTTP 503)" in status.lines()
    assert state.drops()["notifications of alerts"] == {"too many waiting": 6}
    assert status.as_json()["alerts"] == report
    assert "the alert rule slow cannot be evaluated: the store has no metric x (yet)" in str(
        status.reasons
    )
    stay = "the changed alert rules cannot be used, and the former ones stay: alerts.toml"
    assert stay in str(status.reasons)
    assert "http://host/hook accepts no notification (HTTP 503)" in str(status.reasons)
    assert assess(Home(tmp_path), run_state()).as_json()["alerts"] is None


def test_flows_and_levels_are_printed(tmp_path: Path) -> None:
    """Flows of every process that has some; levels that are not normal."""
    flows = {"active": 12, "assigned": 345, "completed": 333}
    levels = [
        {"name": "jdbc", "level": "CRITICAL", "value": 1234, "critical": 1000},
        {"name": "calm", "level": "NORMAL", "value": 1, "critical": 1000},
    ]
    orders = queue("orders") | {"kind": "flows", "flows": flows}
    state = run_state(process(), progress={"queues": [orders], "levels": levels})
    lines = assess(Home(tmp_path), state).lines()
    flows_line = "pipeline/orders: 12 active, 345 assigned, 333 completed; 1 signal waiting"
    assert f"flows      {flows_line}" in lines
    assert "level      pipeline/jdbc: CRITICAL, depth 1,234 of 1,000" in lines
    assert not [line for line in lines if "calm" in line]


def test_what_an_older_version_tells_is_enough(tmp_path: Path) -> None:
    """Its files have no queues, thresholds or batches."""
    page = assess(Home(tmp_path), run_state()).as_json()
    assert (page["queues"], page["thresholds"], page["batches"], page["web"]) == (
        [],
        None,
        [],
        None,
    )


def test_a_run_that_is_down_has_no_queues(tmp_path: Path) -> None:
    """What its processes told last is not so any more; its last batches are."""
    state = RunState(
        now=NOW,
        ingest={"queues": [queue("spool")], "thresholds": {"level": "CRITICAL"}},
        progress={"queues": [queue("jdbc")], "batches": [{"batch": 1}]},
    )
    page = assess(Home(tmp_path), state).as_json()
    assert (page["queues"], page["thresholds"], page["batches"]) == ([], None, [{"batch": 1}])


def test_a_home_is_read_twice_a_second_at_most(tmp_path: Path) -> None:
    """However many ask."""
    home, now = Home(tmp_path / "home"), [10.0]
    home.prepare()
    reader = StatusReader(home, lambda: now[0])
    first = reader.read()
    assert reader.read() is first
    now[0] += FRESH_S
    later = reader.read()
    assert later is not first
    assert later.health is Health.DOWN


def test_the_last_account_of_the_demo_counts() -> None:
    """Whatever else it says."""
    lines = [
        "hello",
        '{"sent": 1, "acknowledged": 1}',
        '{"sent": 5, "acknowledged": 4}',
        "bye",
        "[1]",
    ]
    assert read_sent(lines) == Sent(5, 4)
    assert read_sent(["nothing", "{}"]) is None


@pytest.mark.parametrize(
    ("sent", "counted", "received", "equal", "text"),
    [
        (
            Sent(10, 10),
            CommittedSpans(10),
            10,
            True,
            "balance: 10 spans sent = 10 acknowledged = 10 counted",
        ),
        (
            Sent(10, 10),
            CommittedSpans(10, duplicates=3),
            13,
            True,
            "3 repeated deliveries counted once",
        ),
        (Sent(10, 10), CommittedSpans(15), 15, True, "5 from other senders"),
        (Sent(10, 10), CommittedSpans(10), None, True, "10 counted"),
        (Sent(10, 9), CommittedSpans(9), 9, False, "10 spans sent ≠ 9 acknowledged = 9 counted"),
        (Sent(10, 10), CommittedSpans(9), 10, False, "10 acknowledged ≠ 9 counted"),
        (Sent(10, 10), CommittedSpans(11), 10, False, "10 acknowledged ≠ 11 counted"),
        (Sent(10, 10), CommittedSpans(9, quarantined=1), 10, False, "1 quarantined"),
        (
            Sent(10, 10),
            CommittedSpans(8),
            8,
            False,
            "OUT OF BALANCE: 10 spans sent = 10 acknowledged ≠ 8",
        ),
        (Sent(10, 10), CommittedSpans(9), None, False, "OUT OF BALANCE"),
        (None, CommittedSpans(9), 9, False, "gave no result"),
    ],
)
def test_the_balance(
    sent: Sent | None, counted: CommittedSpans, received: int | None, equal: bool, text: str
) -> None:
    """Sent = acknowledged = counted, with others and repeated deliveries taken into account."""
    verdict = balance(sent, counted, received)
    assert verdict.equal == equal
    assert text in verdict.text


def test_spans_are_counted_by_the_store() -> None:
    """Other event types are not spans."""
    counters = {
        ("rows", "Span", ""): 7,
        ("rows", "Service", ""): 100,
        ("duplicates", "Span", "same"): 2,
        ("quarantined", "Span", "no time"): 1,
        ("quarantined", "Span", "odd"): 1,
    }
    assert counted_of(counters) == CommittedSpans(7, 2, 2)
    assert CommittedSpans(7, 2, 2).since(CommittedSpans(5, 2, 0)) == CommittedSpans(2, 0, 2)


def value(metric: str, entity: str, number: Any) -> dict[str, Value]:
    """The value of a metric for one entity."""
    entry = Value(metric, Grain.MINUTE, 202402291345, entity, entity.upper(), frozenset(), number)
    return {entity: entry}


def test_services_are_rows_the_busiest_first() -> None:
    """What a service has no value of stays empty."""
    rows = service_rows(
        value("service_cpm", "a", 5) | value("service_cpm", "b", 9),
        value("service_resp_time", "a", 120),
        value("service_percentile", "a", {"{p=50}": 100, "{p=99}": 990}),
        value("service_sla", "a", 9950),
        value("service_apdex", "a", 8000),
    )
    assert rows == (ServiceRow("B", 9), ServiceRow("A", 5, 120, 990, 0.995, 0.8))


def test_the_view_shows_the_road_and_the_tables() -> None:
    """Also with names that look like markup, and with nothing known at all."""
    console = Console(width=100, color_system=None)
    state = run_state(
        process(pipeline="restarting"),
        ingest={
            "pid": 1,
            "received_spans": 1500,
            "acknowledged_spans": 1400,
            "queue_rows": 100,
            "level": "CRITICAL",
        },
        progress={"last_batch": 3, "committed_at": NOW - 2, "spans": 1200, "duplicates": 1},
        backlog=Backlog(2, 2048, 1.5),
    )
    services = (ServiceRow("[red]cart", 5, 120, 990, 0.995, 0.8),)
    tables = Tables(202402291345, services, filling=True)
    with console.capture() as shown:
        console.print(draw(state, tables, 1000.0))
    text = shown.get()
    for part in (
        "1,500 spans in, 1,000/s; 1,400 acknowledged",
        "restarting",
        "pressure CRITICAL",
        "2 segments, 2.0 KiB, the oldest 1.5 s old",
        "batch 3, committed 2 s ago; 1,200 spans counted, 1 duplicate dropped",
        "service, 13:45 UTC so far",
        "[red]cart",
        "99.50%",
        "0.800",
    ):
        assert part in text
    assert "1,200 spans counted" in plain_line(state, 1000.0)
    with console.capture() as shown:
        console.print(draw(RunState(now=NOW), Tables(), 0.0))
    assert "no metrics yet" in shown.get()


def test_tables_are_read_from_a_store(tmp_path: Path) -> None:
    """Of the newest complete minute, and the slowest of its hour; metrics may be missing."""
    script = """
        service_cpm = from(Endpoint.*).cpm();
        service_resp_time = from(Endpoint.latency).longAvg();
        service_percentile = from(Endpoint.latency).percentile2(10);
    """
    with open_store(f"sqlite:///{tmp_path}/metrics.db") as store:
        assert read_tables(store) == Tables()
        writer = Writer(store, script=script)
        statements = [
            TopNRow(STATEMENTS, 0, MINUTE, ms, ms, "t", f"s{ms}", f"select {ms}", "select ?")
            for ms in range(300, 310)
        ]
        writer.write(Measurement(5, minute=BEFORE, entity="old"))
        writer.write(Measurement(20), Measurement(40), Measurement(90, entity="two"))
        writer.write(Measurement(1, minute=BEFORE), topn=statements)
        screen = read_tables(store)
    assert (screen.minute, screen.filling) == (MINUTE, False)
    assert screen.services == (ServiceRow("one", 2, 30, 40), ServiceRow("two", 1, 90, 90))
    assert [statement.statement for statement in screen.statements] == [
        f"select {ms}" for ms in range(309, 304, -1)
    ]


@pytest.mark.parametrize(
    ("after_s", "shown"),
    [(30, BEFORE), (119, BEFORE), (120, MINUTE), (9, EARLIER)],
    ids=["filling", "not yet silent", "silent", "the one before not yet settled"],
)
def test_the_minute_that_is_filling_is_not_shown(tmp_path: Path, after_s: int, shown: int) -> None:
    """But the one before, until nothing new came for a minute after the end of the newest."""
    with open_store(f"sqlite:///{tmp_path}/metrics.db") as store:
        writer = Writer(store, script="service_cpm = from(Endpoint.*).cpm();")
        writer.write(*(Measurement(1, minute=minute) for minute in (EARLIER, BEFORE, MINUTE)))
        tables = read_tables(store, bucket_start(MINUTE).timestamp() + after_s)
    assert (tables.minute, tables.filling) == (shown, False)
    assert tables.services == (ServiceRow("one", 1),)


def test_a_minute_that_is_alone_is_shown_while_it_fills(tmp_path: Path) -> None:
    """And said to be so far only; what is more than an hour older is not shown instead."""
    with open_store(f"sqlite:///{tmp_path}/metrics.db") as store:
        writer = Writer(store, script="service_cpm = from(Endpoint.*).cpm();")
        writer.write(Measurement(1, minute=202403011059), Measurement(1, minute=MINUTE))
        tables = read_tables(store, bucket_start(MINUTE).timestamp() + 30)
    assert (tables.minute, tables.filling) == (MINUTE, True)
