"""The supervisor of ``batchmill run``: what it decides, and what it does with real processes."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from pathlib import Path

import pytest

from batchmill.files import write_json
from batchmill.run import Home, HomeInUseError
from batchmill.run.supervisor import (
    Death,
    Decision,
    Process,
    Record,
    RestartPolicy,
    RotatingLog,
    Spec,
    State,
    decide,
    exit_text,
)
from tests.kit.processes import Life, pause_process
from tests.kit.threads import until

POLICY = RestartPolicy(
    initial_s=1.0, max_s=5.0, failed_max_s=8.0, multiplier=2.0, stable_s=30.0, failed_starts=3
)
KILLED = Death(-signal.SIGKILL, 4.0)


def decisions(*deaths: Death, essential: bool = True) -> list[Decision]:
    """What is decided about deaths, one after the other."""
    record = Record()
    decided = []
    for death in deaths:
        decision = decide(POLICY, record, death, essential=essential)
        decided.append(decision)
        record = decision.record
    return decided


def test_each_death_in_a_row_is_waited_out_longer() -> None:
    """Up to a limit; nobody gives up on a process that was ready each time."""
    assert [decision.delay_s for decision in decisions(*[KILLED] * 6)] == [1, 2, 4, 5, 5, 5]


def test_a_stable_time_makes_deaths_forgotten() -> None:
    """The next death is the first one again."""
    delays = [decision.delay_s for decision in decisions(KILLED, KILLED, Death(1, 30.0), KILLED)]
    assert delays == [1, 2, 1, 2]


FAILED, REFUSED = Death(1, None), Death(2, None)


def test_the_first_start_of_what_a_run_cannot_do_without_is_tried_so_often() -> None:
    """In a row; then it is given up. Once it has run, nobody gives up any more."""
    assert [decision.delay_s for decision in decisions(FAILED, FAILED, FAILED)] == [1, 2, None]
    delays = [decision.delay_s for decision in decisions(FAILED, FAILED, KILLED, *[FAILED] * 50)]
    assert None not in delays
    assert None not in [decision.delay_s for decision in decisions(KILLED, REFUSED, FAILED)]


@pytest.mark.parametrize("death", [FAILED, REFUSED])
def test_all_others_are_started_again_for_ever(death: Death) -> None:
    """However they end, and however often: with longer pauses, up to a limit."""
    delays = [decision.delay_s for decision in decisions(*[death] * 200, essential=False)]
    assert delays == [1, 2, 4, *[8] * 197]


def test_being_killed_while_starting_says_nothing_about_it() -> None:
    """Somebody who kills it again and again is outlasted."""
    killed = Death(-signal.SIGKILL, None)
    assert None not in [decision.delay_s for decision in decisions(*[killed] * 10)]
    assert decisions(*[Death(-signal.SIGSEGV, None)] * 3)[-1].delay_s is None


def test_a_wrong_command_line_is_not_tried_twice() -> None:
    """Exit code 2 before it was ready; afterwards it is a death like others."""
    assert decisions(REFUSED)[0].delay_s is None
    assert decisions(Death(2, 1.0))[0].delay_s == 1


def test_exit_codes_and_signals_have_names() -> None:
    """Also those that no system knows."""
    assert (exit_text(3), exit_text(-9), exit_text(-99)) == ("exit code 3", "SIGKILL", "signal 99")


def test_a_log_begins_anew_when_it_is_large(tmp_path: Path) -> None:
    """The newest lines are kept, up to the number of files; nobody else may read them."""
    log = RotatingLog(tmp_path / "x.log", limit=100, files=3)
    for number in range(10):
        log.write(f"line {number} {'x' * 40}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.log", "x.log.1", "x.log.2"]
    kept = [(tmp_path / name).read_text().split()[2] for name in ("x.log", "x.log.1", "x.log.2")]
    assert kept == ["9", "8", "7"]
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


def test_a_log_that_cannot_be_written_stops_nobody(tmp_path: Path) -> None:
    """And says later how much it lacks."""
    folder = tmp_path / "gone"
    log = RotatingLog(folder / "x.log", limit=1000, files=2)
    log.write("one")
    log.write("two")
    folder.mkdir()
    log.write("three")
    lines = [line.split(" ", 1)[1] for line in (folder / "x.log").read_text().splitlines()]
    assert lines == ["(2 lines could not be written here)", "three"]


def test_a_home_is_one_run_s(tmp_path: Path) -> None:
    """A second one is refused at once, by name; the folder is nobody else's to look into."""
    home = Home(tmp_path / "home")
    home.prepare()
    assert home.folder.stat().st_mode & 0o777 == 0o700
    with home.locked():
        write_json(home.supervisor, {"pid": 4711})
        assert home.is_locked()
        with pytest.raises(HomeInUseError, match=r"process 4711.*--home"), home.locked():
            pass
    assert not home.is_locked()
    left = (home.run / ".ingest.json.1f.tmp", home.folder / ".source.json.1f.tmp")
    for path in left:  # processes were killed as they wrote these
        path.touch()
        os.utime(path, (1000, 1000))
    with home.locked():
        assert not any(path.exists() for path in left)


def test_leftovers_of_a_killed_run_are_waited_for(tmp_path: Path) -> None:
    """Their lock is what tells; if they stay, it says so."""
    import fcntl

    home = Home(tmp_path)
    home.prepare()
    left = os.open(home.run / "processes.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(left, fcntl.LOCK_EX)
    with pytest.raises(HomeInUseError, match="killed run"), home.locked(wait_s=0.05):
        pass
    ending = threading.Timer(0.1, os.close, [left])
    ending.start()
    with home.locked():
        pass
    ending.join()


def supervisor(home: Path, *children: str) -> Life:
    """A supervisor and its children."""
    command = [sys.executable, "-m", "tests.run.supervisor_process", str(home), *children]
    return Life(command, home.parent / f"{home.name}.log", os.environ)


def pids(life: Life) -> list[int]:
    """The children that it told of last."""
    last = next(line for line in reversed(life.lines) if line.startswith("up"))
    return [int(part) for part in last.split()[1:]]


def is_gone(pid: int) -> bool:
    """Whether a process, which is not our own child, has ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"


def test_a_process_that_dies_is_started_again(tmp_path: Path) -> None:
    """It is said, its log goes on, and what it had started is gone first."""
    grandchild = tmp_path / "grandchild"
    with supervisor(tmp_path / "home", f"worker=spawn {grandchild} hang") as life:
        life.must_hear("up .*")
        first, started = pids(life)[0], int(grandchild.read_text())
        os.kill(first, signal.SIGKILL)
        life.must_hear(r"worker died \(SIGKILL\): starting it again in 0.01 s")
        life.must_hear("up .*")
        assert pids(life) != [first]
        until(lambda: is_gone(started), f"process {started} has ended")
        os.kill(life.pid, signal.SIGTERM)
        life.end()
    assert life.lines[-1] == "worker ended 0"
    log = (tmp_path / "home" / "log" / "worker.log").read_text()
    assert log.count("--- started") == 2
    assert "--- ended: SIGKILL" in log


def test_a_failed_start_or_two_are_survived(tmp_path: Path) -> None:
    """As when a port is still taken."""
    with supervisor(tmp_path / "home", f"worker=once {tmp_path / 'mark'} hang") as life:
        life.must_hear(r"worker unavailable: exit code 3; trying again in 0.01 s")
        life.must_hear("up .*")


def test_ingest_that_cannot_start_ends_the_run(tmp_path: Path) -> None:
    """With its last words."""
    with supervisor(tmp_path / "home", "other=hang", "ingest=say why exit 7 hang") as life:
        life.must_hear(r"ingest did not start \(exit code 7\), 3 times in a row.*")
        life.end()
    assert life.lines[-1] == "  why"


def test_a_process_that_cannot_start_stops_no_other(tmp_path: Path) -> None:
    """It is tried again and again, with its reason; once it can start, all is well."""
    mark = tmp_path / "mark"
    with supervisor(
        tmp_path / "home", "ingest=hang", f"worker=need {mark} hang", "wrong=say why exit 2 hang"
    ) as life:
        life.must_hear(r"wrong unavailable: exit code 2: why, 8 times in a row; trying again .*")
        mark.touch()
        life.must_hear("ready worker")
        os.kill(life.pid, signal.SIGTERM)
        life.end()
    assert {"ingest ended 0", "worker ended 0"} <= set(life.lines[-3:])
    assert "ready ingest" in life.lines
    assert any(re.match(r"worker unavailable: exit code 3: no .*mark", x) for x in life.lines)
    said = [line for line in life.lines if line.startswith("wrong unavailable")]
    assert len(said) <= 3 + 8, "a line for each power of two, not one for each try"


def test_ctrl_c_reaches_the_supervisor_alone(tmp_path: Path) -> None:
    """Its children are in sessions of their own, and are asked to end by it."""
    with supervisor(tmp_path / "home", "a=hang", "b=hang") as life:
        life.must_hear("up .*")
        os.killpg(life.pid, signal.SIGINT)  # as a terminal does it
        life.must_hear("asked")
        life.end()
    assert life.lines[-2:] == ["a ended 0", "b ended 0"]


def test_a_second_ctrl_c_does_not_wait(tmp_path: Path) -> None:
    """For a child that does not want to end."""
    with supervisor(tmp_path / "home", "a=stubborn") as life:
        life.must_hear("up .*")
        os.killpg(life.pid, signal.SIGINT)
        life.must_hear("asked")
        os.killpg(life.pid, signal.SIGINT)
        life.end()
    assert life.lines[-1] == "a ended -9"


def test_children_do_not_outlive_a_killed_supervisor(tmp_path: Path) -> None:
    """Nor do their own children; also those that hear no signal. The next run has the home."""
    grandchild = tmp_path / "grandchild"
    home = tmp_path / "home"
    with supervisor(home, "a=stubborn", f"b=spawn {grandchild} hang") as life:
        life.must_hear("up .*")
        victims = [*pids(life), int(grandchild.read_text())]
        pause_process(victims[0])
        os.kill(life.pid, signal.SIGKILL)
        until(lambda: all(map(is_gone, victims)), f"the processes {victims} have ended")
    with supervisor(home, "a=hang") as life:
        life.must_hear("up .*")


@pytest.mark.parametrize(
    ("lines", "code", "why"),
    [
        (["x", "batchmill web: port 80 is in use"], 2, "port 80 is in use"),
        ([], 2, "exit code 2"),
        (["Traceback", "KeyError: 1"], 1, "exit code 1: KeyError: 1"),
    ],
)
def test_the_reason_of_a_failed_start_is_reported(
    tmp_path: Path, lines: list[str], code: int, why: str
) -> None:
    """It is the last line of its output; also in the report, until it runs."""
    messages: list[str] = []
    spec = Spec(name="web", title="web UI", arguments=[])
    log = RotatingLog(tmp_path / "web.log", limit=1000, files=1)
    process = Process(spec, RestartPolicy(), log, messages.append)
    process.lines = lines
    process._died(Death(code, None), 0.0)
    assert process.state is State.RESTARTING
    assert messages == [f"web UI unavailable: {why}; trying again in 0.5 s"]
    assert process.report()["reason"] == why


def test_a_process_that_ended_by_itself_can_be_asked_to_end(tmp_path: Path) -> None:
    """Before its end was noted: its exit code is still known afterwards."""
    log = RotatingLog(tmp_path / "log", limit=1000, files=1)
    child = str(Path(__file__).with_name("child.py"))
    spec = Spec(name="brief", target=child, arguments=["exit", "3"])
    process = Process(spec, RestartPolicy(), log, lambda _: None)
    process.start(None)
    assert process.pid is not None
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    process.terminate()
    process.poll(0.0, None)
    assert (process.state, process.code) == (State.ENDED, 3)
