"""``batchmill top``: what it draws of a run, and how it begins and ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from batchmill.cli import main
from batchmill.files import write_json
from batchmill.run import Health, Home
from batchmill.run.top.history import History
from batchmill.run.top.marks import Sheet
from batchmill.run.top.view import draw
from tests.kit.threads import PATIENCE_S

NOW = 1_700_000_000.0
FLOWS = {"active": 12, "assigned": 345, "completed": 333}
ASCII, UNICODE = Sheet(80, ascii_only=True), Sheet(80)


def queue(depths: list[int], **changes: Any) -> dict[str, Any]:
    """A queue with partitions of 100, so deep."""
    fields = {
        "process": "ingest",
        "name": "spool",
        "kind": "queue",
        "depth": sum(depths),
        "capacity": 100 * len(depths),
        "partitions": [{"depth": depth, "capacity": 100} for depth in depths],
        "threads": [{"name": "a-0", "load": 0.25}, {"name": "a-1", "load": 1.0}],
        "moves": 3,
        "last_moves": ["13:00:02 partition 5: thread 1 → 0"],
        "accepted": 9,
        "rejected": {"full": 12},
    }
    return fields | changes


def batch(number: int, took_s: float) -> dict[str, Any]:
    """A micro-batch of which Spark takes three quarters."""
    phases = {"spark": took_s * 0.75, "commit": took_s * 0.25}
    return {"batch": number, "at": NOW, "rows": 1200, "seconds": took_s, "phases": phases}


def status_page(**changes: Any) -> dict[str, Any]:
    """A run in which much happens."""
    page: dict[str, Any] = {
        "health": "degraded",
        "reasons": ["senders are told to wait: pressure is CRITICAL"],
        "home": "/data/run",
        "at": NOW,
        "supervisor": {"pid": 1},
        "processes": {
            "ingest": {"state": "running", "pid": 10, "started": NOW - 300},
            "pipeline": {"state": "running", "pid": 11, "started": NOW - 7, "restarts": 2},
        },
        "queue_rows": 350,
        "spool": {"segments": 4, "bytes": 3 * 2**20},
        "lag_s": 12.5,
        "last_batch": 41,
        "committed_at": NOW - 3,
        "drops": {"rejected spans": {"no trace id": 7}},
        "thresholds": {
            "level": "CRITICAL",
            "measures": [
                {
                    "name": "queue rows",
                    "value": 350,
                    "warning": 150,
                    "critical": 300,
                    "critical_plus": 450,
                }
            ],
        },
        "queues": [
            queue([0, 50, 100, 7]),
            queue([3, 0], name="orders", kind="flows", process="pipeline", flows=FLOWS),
        ],
        "levels": [
            {
                "process": "pipeline",
                "name": "jdbc",
                "level": "WARNING",
                "value": 77,
                "warning": 60,
                "critical": 120,
                "critical_plus": 180,
            }
        ],
        "web": "http://127.0.0.1:8080",
        "batches": [batch(40, 1.0), batch(41, 2.0)],
        "exports": {},
        "ingest": {"pid": 10, "received_spans": 5000, "requests": {"http ok": 80}},
        "pipeline": {"spans": 4600},
    }
    return page | changes


def shown(page: dict[str, Any], sheet: Sheet, history: History | None = None) -> str:
    """The drawing as text."""
    console = Console(width=sheet.width, color_system=None)
    with console.capture() as captured:
        console.print(draw(page, history or History(), sheet))
    return captured.get()


@pytest.mark.parametrize("width", [80, 160])
def test_all_that_the_page_has_is_drawn(width: int) -> None:
    """In one column and in two."""
    text = shown(status_page(), Sheet(width))
    for part in (
        "DEGRADED",
        "http://127.0.0.1:8080",
        "! senders are told to wait: pressure is CRITICAL",
        "5,000 spans",
        "350 spans",
        "3.0 MiB",
        "lag 12 s",
        "2.00 s last",
        "batch 41",
        "3.00 s ago",
        "4,600 spans",
        "ingest/spool",
        "·▅█▁",
        "25%",
        "100%",
        "3 moves: 13:00:02 partition 5: thread 1 → 0",
        "12 full",
        "CRITICAL",
        "350; warning 150, critical 300",
        "pipeline/orders",
        "12 active, 345 assigned, 333 completed",
        "pipeline/jdbc",
        "77; warning 60, critical 120",
        "newest 2.00 s, median 1.50 s, worst 2.00 s of 2; 1,200 rows",
        "1.50 s",
        "500 ms",
        "7 rejected spans: no trace id",
        "pipeline",
    ):
        assert part in text, part


@pytest.mark.parametrize(("messages", "said"), [(1234, "1,234"), (None, "not known")])
def test_a_topic_stands_in_the_spools_place(messages: int | None, said: str) -> None:
    """With what waits in it, as far as the pipeline has told; no spool is spoken of."""
    page = status_page(topic={"address": "kafka://a:1/t", "messages": messages}, queues=[])
    del page["spool"]
    history = History()
    for at in (NOW, NOW + 1):
        history.add(page | {"at": at})
    text = shown(page, Sheet(160), history)
    assert "spool" not in text
    road, below = re.search(r"^.*senders.*topic.*$\n^.*$", text, re.MULTILINE)[0].splitlines()  # type: ignore[index]
    assert below[road.index("topic") :].startswith(said)


def test_a_batch_that_hangs_is_shown_in_place_of_the_newest() -> None:
    """For how long it has been running."""
    text = shown(status_page(long_batch={"batch": 42, "seconds": 720.0}), Sheet(160))
    assert "12 min so far" in text
    assert "2.00 s last" not in text


@pytest.mark.parametrize("width", [40, 80, 119, 120, 160, 300])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    """A line that is wrapped would tear the picture apart."""
    history = History()
    history.add(status_page())
    history.add(status_page(at=NOW + 1))
    queues = [queue([1] * 500, name="a" * 40), queue([3], unit="spans", process="export")]
    drawing = draw(status_page(queues=queues), history, Sheet(width))
    narrow, wide = (Console(width=columns, color_system=None) for columns in (width, 4000))
    assert len(narrow.render_lines(drawing)) == len(wide.render_lines(drawing))


def test_a_small_window_shows_what_it_has_room_for() -> None:
    """And says that there is more."""
    lines = shown(status_page(), Sheet(80, 12)).splitlines()
    assert len(lines) == 12
    assert re.fullmatch(r"… \d+ more lines: a larger window shows them", lines[-1].strip())


def test_nothing_known_is_drawn_as_well() -> None:
    """Also what an older version left: no queues, no thresholds, no batches."""
    nothing = {"health": "down", "reasons": ["nothing runs"], "home": "/x", "at": NOW}
    text = shown(nothing, Sheet(80))
    assert "nothing runs in /x: start `batchmill run`" in text
    assert "no report of ingest" in text
    assert "micro-batches none yet" in text
    known = ("health", "home", "at", "processes", "ingest", "last_batch")
    old = {key: status_page()[key] for key in known}
    assert "none since the pipeline started" in shown(old, Sheet(160))


def test_rates_are_those_of_the_last_seconds() -> None:
    """A new life of ingest counts from 0, and gives no rate until it was seen twice."""
    history = History(rate_s=10)
    for second in range(31):
        came = 100 * second if second < 20 else 2000 + 50 * (second - 20)
        history.add(status_page(at=NOW + second, ingest={"pid": 1, "received_spans": came}))
    assert history.received_per_s() == 50
    assert "50/s" in shown(status_page(), Sheet(80), history)
    history.add(status_page(at=NOW + 31, ingest={"pid": 2, "received_spans": 5}))
    assert history.received_per_s() is None


def test_a_line_of_the_past_has_the_highest_at_full_height() -> None:
    """The newest at its end; all that there is room for."""
    assert UNICODE.sparkline([9, 0, 1, 2, 4], 4).plain == "▁▂▄█"
    assert UNICODE.sparkline([0, 0], 4).plain == "▁▁"
    assert ASCII.sparkline([0, 8], 4).plain == ".@"


def test_a_heat_row_has_a_character_for_each_partition() -> None:
    """Where there are more than characters, the fullest of a few is told: heat is not averaged."""
    parts = [{"depth": depth, "capacity": 10} for depth in (0, 1, 5, 10)]
    assert UNICODE.heat_row(parts, 10).plain == "·▁▅█"
    assert UNICODE.heat_row(parts, 2).plain == "▁█"
    assert ASCII.heat_row(parts, 10).plain == "_.+@"
    assert UNICODE.heat_row([{"depth": 3, "capacity": None}], 10).plain == "▁"


def test_a_scale_has_a_notch_at_each_threshold() -> None:
    """And something is never drawn as nothing."""
    assert ASCII.scale(1, (50, 100), 10, "").plain == "#....|...."
    assert ASCII.scale(75, (50, 100), 10, "").plain == "########.."
    assert ASCII.scale(500, (50, 100), 10, "").plain == "##########"
    assert ASCII.scale(0, (0, 0), 4, "").plain == "|..."


def test_phases_are_stacked() -> None:
    """Side by side in a bar, one above the other in a chart; together they fill it."""
    parts = [(3.0, "red"), (1.0, "blue")]
    assert ASCII.stacked(parts, 8, letters="LC").plain == "LLLLLLCC"
    assert ASCII.stacked([(0.0, "red")], 8, letters="L").plain == ""
    chart = ASCII.columns([parts, [(1.0, "red"), (1.0, "blue")]], 10, 4)
    assert [line.plain for line in chart] == ["# ", "# ", "##", "##"]
    assert [span.style for span in chart[2].spans] == ["red", "blue"]


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """The folder of a run that is down, and has committed something."""
    made = Home(tmp_path / "home")
    made.prepare()
    made.checkpoint.mkdir()
    progress = {"last_batch": 41, "committed_at": time.time(), "batches": [batch(41, 2.0)]}
    write_json(made.progress, progress)
    return made


def test_without_a_terminal_it_is_printed_once(
    home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As plain text; a run that is down says so, and the exit code is that of `status`."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys, "argv", ["batchmill", "top", f"--home={home.folder}", "--once"])
    assert main() == Health.DOWN
    text = capsys.readouterr().out
    assert f"nothing runs in {home.folder}: start `batchmill run`" in " ".join(text.split())
    assert "newest 2.00 s" in text
    assert "\x1b" not in text


@contextlib.contextmanager
def terminal(home: Home) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The command in a terminal of 80 by 24; the process, and the terminal's other end."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = [sys.executable, "-m", "batchmill", "top", f"--home={home.folder}"]
    with subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"},
    ) as process:
        try:
            yield process, ours
        finally:
            process.kill()
            os.close(theirs)
            os.close(ours)


def read_until(process: subprocess.Popen[bytes], handle: int, wanted: bytes) -> None:
    """Read what a terminal shows, up to that."""
    deadline_s, seen = time.monotonic() + PATIENCE_S, b""
    while wanted not in seen:
        readable, _, _ = select.select([handle], [], [], 0.2)
        if readable:
            seen += os.read(handle, 65536)
        else:
            assert process.poll() is None, seen
            assert time.monotonic() < deadline_s, seen


@pytest.mark.parametrize("how", ["q", "Ctrl-C"])
def test_it_ends_with_q_and_ctrl_c(home: Home, how: str) -> None:
    """With the terminal as it was: its own screen left, and keys shown again."""
    with terminal(home) as (process, screen):
        before = termios.tcgetattr(screen)
        read_until(process, screen, b"nothing runs in")
        if how == "q":
            os.write(screen, b"q")
        else:
            process.send_signal(signal.SIGINT)
        read_until(process, screen, b"\x1b[?1049l")
        assert process.wait(PATIENCE_S) == 0
        assert termios.tcgetattr(screen) == before
