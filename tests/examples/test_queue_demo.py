"""The queue demo, run as users do."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("rich")

import batchmill
from examples.queue_demo import demo
from examples.queue_demo.view import Meter, Snapshot
from tests.examples.kit import NAMES, queue
from tests.kit.files import ROOT
from tests.kit.threads import PATIENCE_S

WITHOUT_RICH = """
import sys
sys.modules["rich"] = None
sys.argv = ["queue_demo"]
from examples.queue_demo.__main__ import main
sys.exit(main())
"""

# A shell's background job starts with Ctrl-C ignored, and hands that on to the tests.
LISTENING_TO_CTRL_C = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv = ["queue_demo", "--seconds", "60"]
from examples.queue_demo.__main__ import main
sys.exit(main())
"""


@pytest.fixture(scope="module")
def piped_demo() -> subprocess.CompletedProcess[str]:
    """A short run into a pipe, though the environment claims a terminal."""
    return queue_demo("--seconds", "1.3", FORCE_COLOR="1", TTY_COMPATIBLE="1")


def test_demo_succeeds(piped_demo: subprocess.CompletedProcess[str]) -> None:
    """Without a terminal the command runs to its end, says nothing on stderr, and exits with 0."""
    assert (piped_demo.returncode, piped_demo.stderr) == (0, "")


def test_demo_in_a_pipe_writes_no_control_codes(
    piped_demo: subprocess.CompletedProcess[str],
) -> None:
    """Into a pipe goes text alone, whatever FORCE_COLOR says."""
    assert re.findall(r"[\x00-\x09\x0b-\x1f\x7f]", piped_demo.stdout) == []


def test_demo_in_a_pipe_shows_what_goes_on(
    piped_demo: subprocess.CompletedProcess[str],
) -> None:
    """Where nothing can be redrawn, lines say how fast the queues are."""
    assert re.search(r"^ *\d\.\d s  L1 [\d,]+/s in, ", piped_demo.stdout, re.MULTILINE)


def test_plain_lines_come_once_a_second(capsys: pytest.CaptureFixture[str]) -> None:
    """A line a second at most; a gap is not made up for."""
    meter, lines = Meter(Snapshot(0.0, (queue(),))), demo.PlainLines()
    for at_s in (0.4, 0.9, 1.1, 1.9, 4.5, 4.9, 5.0):
        meter.add(Snapshot(at_s, (queue(),)))
        lines(meter)
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed] == ["1.1", "4.5", "5.0"]


@pytest.mark.parametrize("name", NAMES)
def test_demo_ends_with_an_account_that_balances(
    piped_demo: subprocess.CompletedProcess[str], name: str
) -> None:
    """The closing table has every queue, with as many items consumed as accepted: some, not 0."""
    [row] = re.findall(rf"^{name} +(.*)$", piped_demo.stdout, re.MULTILINE)
    accepted, consumed, failed, _full, stopped, unregistered, pending = row.split()
    assert accepted == consumed != "0"
    assert {failed, stopped, unregistered, pending} == {"0"}
    assert f"✓ {name}: accepted {accepted} = consumed {consumed}" in piped_demo.stdout


def test_demo_accounts_for_every_sample_end_to_end(
    piped_demo: subprocess.CompletedProcess[str],
) -> None:
    """The rows in the database stand for exactly the samples that L1 consumed."""
    [(arrived, consumed)] = re.findall(
        r"✓ end to end: .* stand for ([\d,]+) samples,\s+and L1 consumed ([\d,]+)",
        piped_demo.stdout,
    )
    assert arrived == consumed


@pytest.mark.skipif(os.name == "nt", reason="Windows cannot send a process Ctrl-C alone")
def test_ctrl_c_ends_the_queues_early_with_its_account() -> None:
    """After Ctrl-C everything accepted is still consumed, and the exit code says so."""
    with subprocess.Popen(
        [sys.executable, "-c", LISTENING_TO_CTRL_C],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
        cwd=ROOT,
        text=True,
        encoding="utf-8",
    ) as queues:
        assert queues.stdout is not None
        for line in queues.stdout:
            if " s  L1 " in line:  # the first second is over
                break
        queues.send_signal(signal.SIGINT)
        out, err = queues.communicate(timeout=PATIENCE_S)
    assert (queues.returncode, err) == (0, "")
    assert "Ended by Ctrl-C" in out
    assert out.count("✓") == len(NAMES) + 1


@pytest.mark.skipif(os.name == "nt", reason="Windows has no pseudo-terminals of this kind")
def test_demo_in_a_terminal_redraws_in_place() -> None:
    """In a terminal the view moves the cursor up and draws over itself; the account follows."""
    shown = in_a_terminal("--seconds", "1")
    assert "\x1b[1A" in shown
    assert shown.count("✓") == len(NAMES) + 2  # end to end, and the orders of the second part


@pytest.mark.skipif(os.name == "nt", reason="Windows has no pseudo-terminals of this kind")
def test_demo_in_a_dumb_terminal_writes_lines() -> None:
    """A terminal that cannot move its cursor gets what a pipe gets."""
    shown = in_a_terminal("--seconds", "1.3", TERM="dumb")
    assert "\x1b" not in shown
    assert " s  L1 " in shown


def test_demo_in_ascii() -> None:
    """Where the output's encoding has no bars and check marks, the command does without."""
    done = queue_demo("--seconds", "0.2", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()


@pytest.mark.skipif(os.name == "nt", reason="a closed pipe is another error on Windows")
def test_demo_whose_reader_left_ends_quietly() -> None:
    """`python -m examples.queue_demo | head -1` fails without a traceback."""
    with subprocess.Popen(
        [sys.executable, "-m", "examples.queue_demo", "--seconds", "1.3"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
        cwd=ROOT,
    ) as queues:
        assert queues.stdout is not None
        assert queues.stderr is not None
        queues.stdout.readline()
        queues.stdout.close()
        err = queues.stderr.read()
    assert (queues.returncode, err) == (1, b"")


def test_missing_rich_is_named() -> None:
    """Without rich the demo fails and says what to install, without a traceback."""
    done = run(sys.executable, "-c", WITHOUT_RICH)
    assert done.returncode == 1
    assert "pip install 'batchmill[cli]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon", "3601"])
def test_bad_seconds_are_refused_by_name(seconds: str) -> None:
    """A length that makes no sense is refused with the option, the value and what is allowed."""
    done = queue_demo(f"--seconds={seconds}")
    assert done.returncode == 2
    assert f"--seconds: {seconds!r} is not valid: it must be a number above 0" in done.stderr


def test_account_that_does_not_balance_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command fails when a queue has not consumed all that it accepted."""
    monkeypatch.setattr(demo, "balances", lambda stats: stats.name != NAMES[2])
    assert demo.run(0.1) == 1


def environment(**changes: str) -> dict[str, str]:
    """This process's, with the package under test to be found, and with its output in UTF-8."""
    source = str(Path(batchmill.__file__).parent.parent)
    return os.environ | {"PYTHONPATH": source, "PYTHONIOENCODING": "utf-8"} | changes


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end with its output in pipes."""
    return subprocess.run(
        command,
        env=environment(**variables),
        cwd=ROOT,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=PATIENCE_S,
        check=False,
    )


def queue_demo(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the demo as users do."""
    return run(sys.executable, "-m", "examples.queue_demo", *arguments, **variables)


def in_a_terminal(*arguments: str, TERM: str = "xterm-256color") -> str:  # noqa: N803
    """What the command writes to a terminal, control codes and all."""
    import pty

    ours, theirs = pty.openpty()
    queues = subprocess.Popen(
        [sys.executable, "-m", "examples.queue_demo", *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment(TERM=TERM, COLUMNS="80", LINES="24"),
        cwd=ROOT,
    )
    os.close(theirs)
    written = b""
    try:
        while piece := os.read(ours, 65536):
            written += piece
    except OSError:  # how Linux says that the other side has closed
        pass
    finally:
        os.close(ours)
    assert queues.wait(timeout=PATIENCE_S) == 0, written.decode()
    return written.decode()
