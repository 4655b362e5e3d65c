from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

import batchmill
from batchmill import BatchQueueStats, PartitionStats, ThreadLoad, presets
from batchmill.cli import _demo, _view
from batchmill.cli._meter import Look, Meter, balances
from batchmill.cli._metrics import METRIC_CLASSES, SlowSql
from batchmill.cli._pipeline import Pipeline
from batchmill.cli._traffic import Pace, rates_per_s

NAMES = (
    presets.METRICS_L1_AGGREGATION,
    presets.METRICS_L2_PERSISTENCE,
    presets.TOPN_PERSISTENCE,
    presets.JDBC_BATCH_PERSISTENCE,
)

WITHOUT_RICH = """
import sys
sys.modules["rich"] = None
sys.argv = ["batchmill", "demo"]
from batchmill.cli import main
sys.exit(main())
"""

# A shell's background job starts with Ctrl-C ignored, and hands that on to the tests.
LISTENING_TO_CTRL_C = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv = ["batchmill", "demo", "--seconds", "60"]
from batchmill.cli import main
sys.exit(main())
"""


@pytest.fixture(scope="module")
def piped_demo() -> subprocess.CompletedProcess[str]:
    """The demonstration, short, with nobody at a terminal; though the environment claims so."""
    return batchmill_command("demo", "--seconds", "2", FORCE_COLOR="1", TTY_COMPATIBLE="1")


def test_demo_succeeds(piped_demo: subprocess.CompletedProcess[str]) -> None:
    """Without a terminal the demo runs to its end, says nothing on stderr, and exits with 0."""
    assert (piped_demo.returncode, piped_demo.stderr) == (0, "")


def test_demo_in_a_pipe_writes_no_control_codes(
    piped_demo: subprocess.CompletedProcess[str],
) -> None:
    """Into a pipe goes text alone, whatever FORCE_COLOR says."""
    assert re.findall(r"[\x00-\x09\x0b-\x1f\x7f]", piped_demo.stdout) == []


def test_demo_in_a_pipe_shows_what_goes_on(piped_demo: subprocess.CompletedProcess[str]) -> None:
    """Where nothing can be redrawn, lines say how fast the queues are."""
    assert re.search(r"^ *\d\.\d s  L1 [\d,]+/s in, ", piped_demo.stdout, re.MULTILINE)


def test_plain_lines_come_once_a_second(capsys: pytest.CaptureFixture[str]) -> None:
    """A look prints a line if a full second has passed since the last; a gap is not made up for."""
    meter, lines = Meter(Look(0.0, (queue(),))), _demo.PlainLines()
    for at_s in (0.4, 0.9, 1.1, 1.9, 4.5, 4.9, 5.0):
        meter.add(Look(at_s, (queue(),)))
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
def test_ctrl_c_ends_the_demo_early_with_its_account() -> None:
    """After Ctrl-C everything accepted is still consumed, and the exit code says so."""
    with subprocess.Popen(
        [sys.executable, "-c", LISTENING_TO_CTRL_C],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
        text=True,
        encoding="utf-8",
    ) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            if " s  L1 " in line:  # the first second is over
                break
        demo.send_signal(signal.SIGINT)
        out, err = demo.communicate(timeout=60)
    assert (demo.returncode, err) == (0, "")
    assert "Ended by Ctrl-C" in out
    assert out.count("✓") == len(NAMES) + 1


@pytest.mark.skipif(os.name == "nt", reason="Windows has no pseudo-terminals of this kind")
def test_demo_in_a_terminal_redraws_in_place() -> None:
    """In a terminal the view moves the cursor up and draws over itself; the account follows."""
    shown = in_a_terminal("demo", "--seconds", "1")
    assert "\x1b[1A" in shown
    assert shown.count("✓") == len(NAMES) + 2  # end to end, and the orders of the second act


@pytest.mark.skipif(os.name == "nt", reason="Windows has no pseudo-terminals of this kind")
def test_demo_in_a_dumb_terminal_writes_lines() -> None:
    """A terminal that cannot move its cursor gets what a pipe gets."""
    shown = in_a_terminal("demo", "--seconds", "1", TERM="dumb")
    assert "\x1b" not in shown
    assert " s  L1 " in shown


def test_demo_in_ascii() -> None:
    """Where the output's encoding has no bars and check marks, the demo does without."""
    done = batchmill_command("demo", "--seconds", "0.2", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()


@pytest.mark.skipif(os.name == "nt", reason="a closed pipe is another error on Windows")
def test_demo_whose_reader_left_ends_quietly() -> None:
    """`batchmill demo | head -1` fails without a traceback."""
    with subprocess.Popen(
        [sys.executable, "-m", "batchmill", "demo", "--seconds", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    ) as demo:
        assert demo.stdout is not None
        assert demo.stderr is not None
        demo.stdout.readline()
        demo.stdout.close()
        err = demo.stderr.read()
    assert (demo.returncode, err) == (1, b"")


def test_missing_rich_is_named() -> None:
    """Without rich the command fails and says what to install, without a traceback."""
    done = run(sys.executable, "-c", WITHOUT_RICH)
    assert done.returncode == 1
    assert "pip install 'batchmill[cli]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_version_is_the_package_s() -> None:
    """`batchmill --version` prints the version of the package."""
    assert batchmill_command("--version").stdout == f"batchmill {batchmill.__version__}\n"


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon", "3601"])
def test_bad_seconds_are_refused_by_name(seconds: str) -> None:
    """A length that makes no sense is refused with the option, the value and what is allowed."""
    done = batchmill_command("demo", f"--seconds={seconds}")
    assert done.returncode == 2
    assert f"--seconds: {seconds!r} is not valid: it must be a number above 0" in done.stderr


def test_account_that_does_not_balance_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo fails when a queue has not consumed all that it accepted."""
    monkeypatch.setattr(_demo, "balances", lambda stats: stats.name != NAMES[2])
    assert _demo.run(0.1) == 1


def test_pipeline_brings_every_sample_to_the_database() -> None:
    """What L1 and L2 merged is passed on through shutdown: counts arrive whole."""
    with Pipeline(rebalance_interval_s=60) as pipeline:
        for index, metric in enumerate(METRIC_CLASSES):
            pipeline.l1.produce_many([metric("web", 1, 2.0)] * (index + 1))
    count = len(METRIC_CLASSES)
    assert pipeline.database.samples == count * (count + 1) // 2


def test_pipeline_merges_on_the_way() -> None:
    """Samples of one entity and class become one row."""
    with Pipeline(rebalance_interval_s=60) as pipeline:
        pipeline.l1.produce_many([METRIC_CLASSES[0]("web", 1, 2.0)] * 100)
    assert pipeline.database.rows == 1


def test_topn_keeps_the_ten_slowest() -> None:
    """Of many slow statements ten are written."""
    with Pipeline(rebalance_interval_s=60) as pipeline:
        pipeline.topn.produce_many([SlowSql(f"statement {n}", n) for n in range(200)])
    assert pipeline.database.rows == 10


def test_l1_classes_are_dealt_unevenly() -> None:
    """Dealt to four threads in turn, the busiest classes leave the threads uneven by 1.25."""
    rates = rates_per_s(1000)
    per_thread = [sum(rates[thread::4]) for thread in range(4)]
    assert max(per_thread) / min(per_thread) > 1.25


def test_rates_add_up() -> None:
    """The classes share the whole rate."""
    assert sum(rates_per_s(20_000)) == pytest.approx(20_000)


def test_pace_keeps_fractions() -> None:
    """A rate that gives no whole item per tick is kept over many ticks."""
    pace = Pace(0.25)
    assert [pace.items(1.0) for _ in range(8)] == [0, 0, 0, 1, 0, 0, 0, 1]


def test_rates_are_of_the_last_second() -> None:
    """A rate is the difference to the look a second ago, not to the start."""
    meter = Meter(Look(0.0, (queue(),)))
    meter.add(Look(5.0, (queue(accepted=900, consumed=900),)))
    meter.add(Look(7.0, (queue(accepted=1000, consumed=940),)))
    [rate] = meter.rates()
    assert (rate.accepted, rate.consumed) == (50, 20)


def test_rates_of_a_single_look_are_zero() -> None:
    """With nothing to compare with there is no rate, and no error."""
    [rate] = Meter(Look(0.0, (queue(),))).rates()
    assert (rate.accepted, rate.consumed) == (0, 0)


def test_loads_before_freeze_at_the_rebalance() -> None:
    """'Before' is what threads did up to the last look without a rebalance."""
    before = rebalanced_meter().loads_before()
    assert before is not None
    assert before.shares == pytest.approx((0.8, 0.4))
    assert before.ratio == pytest.approx(2.0)


def test_loads_after_begin_with_the_rebalance() -> None:
    """'After' leaves out what threads did before the latest rebalance."""
    after = rebalanced_meter().loads_after()
    assert after is not None
    assert after.shares == pytest.approx((0.6, 0.6))


def test_no_loads_after_without_a_rebalance() -> None:
    """As long as nothing was moved there is no 'after'."""
    meter = Meter(Look(0.0, (queue(),)))
    meter.add(Look(1.0, (queue(busy=(0.8, 0.4)),)))
    assert meter.loads_after() is None


def test_ratio_of_a_thread_without_work_is_none() -> None:
    """A thread that did nothing makes no infinite ratio."""
    meter = Meter(Look(0.0, (queue(),)))
    meter.add(Look(1.0, (queue(busy=(0.8, 0.0)),)))
    loads = meter.loads_before()
    assert loads is not None
    assert loads.ratio is None


def test_queue_that_consumed_all_it_accepted_balances() -> None:
    """What was refused at the door is no part of the balance."""
    assert balances(queue(accepted=7, consumed=7, full=3))


@pytest.mark.parametrize("missing", ["pending", "failed", "unregistered"])
def test_queue_that_did_not_consume_all_does_not_balance(missing: str) -> None:
    """An accepted item that waits, failed, or found no handler breaks the balance."""
    short = queue(
        accepted=7,
        consumed=6,
        failed=int(missing == "failed"),
        unregistered=int(missing == "unregistered"),
    )
    assert not balances(short)


def test_view_fits_a_small_terminal() -> None:
    """Six-digit figures and all, the view stays within 80 by 24, line end and ^C line included."""
    lines = drawn(_view.frame(rebalanced_meter(four=True), seconds=12, phase="x" * 80)).splitlines()
    assert len(lines) < 24
    assert max(map(len, lines)) <= 80


def test_view_cuts_nothing_in_a_small_terminal() -> None:
    """At 80 columns every column is there in full."""
    text = drawn(_view.frame(rebalanced_meter(four=True), seconds=12, phase=""))
    assert "…" not in text
    for figure in (*NAMES, "full 12,345", "14 in 1", "max/min 2.00", "max/min 1.00"):
        assert figure in text


@pytest.mark.parametrize(
    "seconds_s", [0.0, 2.0, 5.0, 7.1, 11.0], ids=["start", "dealt", "moved", "burst", "steady"]
)
def test_phase_is_one_line(seconds_s: float) -> None:
    """What is said about the moment fits a line of 80, so that the view does not jump."""
    meter = Meter(Look(0.0, (queue(),)))
    meter.add(Look(seconds_s, (queue(rebalances=int(seconds_s > 4)),)))
    assert len(_demo.Script(12).phase(meter)) <= 80


def test_closing_marks_what_does_not_balance() -> None:
    """A queue that lost an item has a cross, and the words say it is not equal."""
    lost = queue(accepted=7, consumed=6)
    text = drawn(_view.closing([lost], rows=1, samples=6, before=None, after=None))
    assert f"✗ {NAMES[0]}: accepted 7 is not consumed 6" in text


def test_closing_marks_samples_that_did_not_arrive() -> None:
    """Fewer samples in the database than L1 consumed is a cross."""
    fine = queue(accepted=7, consumed=7)
    text = drawn(_view.closing([fine], rows=1, samples=6, before=None, after=None))
    assert "✗ end to end" in text


@pytest.mark.parametrize(
    ("share", "bar"),
    [(0.0, "░░░░"), (0.0001, "▏░░░"), (0.5, "██░░"), (0.625, "██▌░"), (1.0, "████"), (3, "████")],
)
def test_bar_is_as_long_as_its_share(share: float, bar: str) -> None:
    """A bar goes in eighths; a little is never drawn as nothing, nor too much as more than all."""
    assert _view.Bar(share, "").draw(4).plain == bar


@pytest.mark.parametrize(("share", "bar"), [(0.0, "...."), (0.01, "#..."), (1.0, "####")])
def test_bar_in_ascii(share: float, bar: str) -> None:
    """Without block characters a bar has its full width too."""
    assert _view.Bar(share, "").draw(4, ascii_only=True).plain == bar


def test_drops_are_shown_by_reason() -> None:
    """Each reason that occurred is named with its count, the others are not."""
    dropped = queue(full=1200, unregistered=3).dropped
    assert _view.drop_text(dropped) == "full 1,200, unregistered 3"


def queue(
    name: str = NAMES[0],
    *,
    accepted: int = 0,
    consumed: int = 0,
    failed: int = 0,
    full: int = 0,
    unregistered: int = 0,
    rebalances: int = 0,
    busy: tuple[float, ...] = (0.0, 0.0),
) -> BatchQueueStats:
    """A snapshot with these figures and nothing else in it."""
    row = PartitionStats(
        index=0, used=0, capacity=100, drained=accepted, refused=full, thread=0, classes=()
    )
    return BatchQueueStats(
        name=name,
        running=True,
        partitions=tuple(replace(row, index=index) for index in range(40)),
        threads=tuple(
            ThreadLoad(index=index, partitions=20, items=0, busy_seconds=seconds)
            for index, seconds in enumerate(busy)
        ),
        accepted=accepted,
        consumed=consumed,
        failed=failed,
        dropped={"full": full, "stopped": 0, "unregistered": unregistered},
        rebalances=rebalances,
        moved_partitions=14 * rebalances,
        flush_cycles=0,
        idle_cycles=0,
        recovered_slots=0,
    )


def rebalanced_meter(*, four: bool = False) -> Meter:
    """Two threads, 0.8 and 0.4 busy for two seconds, 0.6 each for two after the rebalance."""

    def look(at_s: float, rebalances: int, busy: tuple[float, float]) -> Look:
        done = int(at_s * 99_999)
        stats = queue(accepted=done, consumed=done, full=12_345, rebalances=rebalances, busy=busy)
        return Look(at_s, tuple(replace(stats, name=name) for name in NAMES[: 4 if four else 1]))

    meter = Meter(look(0.0, 0, (0.0, 0.0)))
    meter.add(look(2.0, 0, (1.6, 0.8)))
    meter.add(look(2.5, 1, (2.0, 1.0)))
    meter.add(look(4.5, 1, (3.2, 2.2)))
    return meter


def drawn(what: RenderableType, width: int = 80) -> str:
    """What a terminal of that width shows."""
    console = Console(width=width, height=24, color_system=None)
    with console.capture() as capture:
        console.print(what)
    return capture.get()


def environment(**changes: str) -> dict[str, str]:
    """This process's, with the package under test to be found, and with its output in UTF-8."""
    source = str(Path(batchmill.__file__).parent.parent)
    return os.environ | {"PYTHONPATH": source, "PYTHONIOENCODING": "utf-8"} | changes


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end with its output in pipes."""
    return subprocess.run(
        command,
        env=environment(**variables),
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=100,
        check=False,
    )


def batchmill_command(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command as users do."""
    return run(sys.executable, "-m", "batchmill", *arguments, **variables)


def in_a_terminal(*arguments: str, TERM: str = "xterm-256color") -> str:  # noqa: N803
    """What the command writes to a terminal, control codes and all."""
    import pty

    ours, theirs = pty.openpty()
    demo = subprocess.Popen(
        [sys.executable, "-m", "batchmill", *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment(TERM=TERM, COLUMNS="80", LINES="24"),
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
    assert demo.wait(timeout=60) == 0, written.decode()
    return written.decode()
