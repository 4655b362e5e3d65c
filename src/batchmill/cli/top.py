"""``batchmill top``: the pipeline page in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchmill.cli import config, status
from batchmill.errors import BatchmillError
from batchmill.run.home import Home
from batchmill.run.top.history import History

if TYPE_CHECKING:
    from rich.console import Console

    from batchmill.run.top.marks import Sheet

LOOK_S = 1.0
PLAIN_WIDTH = 100
QUIT = frozenset("qQ\x03\x04")
"""q, Ctrl-C and Ctrl-D."""


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "top",
        help="watch a run in the terminal: the road with live numbers",
        description="Draw the road of a run with live numbers: queues by partition, thresholds, "
        "threads, spool, micro-batches by phase, lag, what was dropped and why, processes. It "
        "looks each second; q or Ctrl-C quits, and the run goes on. Where there is no terminal, or "
        "with --once, it prints what there is now; the exit code is that of `batchmill status`.",
    )
    parser.add_argument("--home", metavar="PATH", help="of the run (default: as for `run`)")
    parser.add_argument("--config", metavar="FILE", help="settings (default: ./batchmill.toml)")
    parser.add_argument("--once", action="store_true", help="print it once, then end")


def run(given: argparse.Namespace) -> int:
    """Watch; the exit code."""
    from rich.console import Console

    try:
        settings = config.load(given)
    except BatchmillError as error:
        print(f"batchmill top: {error}", file=sys.stderr)
        return status.DOWN
    home = Home(Path(settings["home"]).absolute())
    console = Console()
    if not sys.stdout.isatty():
        # A pipe or a file gets text alone, whatever FORCE_COLOR says.
        console = Console(force_terminal=False, color_system=None, width=PLAIN_WIDTH)
    if given.once or not console.is_terminal or console.is_dumb_terminal:
        return _once(home, console)
    _watch(home, console)
    return 0


def _once(home: Home, console: Console) -> int:
    from batchmill.run.top.view import draw

    seen = status.look(home)
    verdict = status.health(seen)
    told = status.as_json(home, seen, verdict)
    console.print(draw(told, History(), _sheet(console, None)))
    return verdict.code


def _watch(home: Home, console: Console) -> None:
    from rich.live import Live

    from batchmill.run.top.view import draw

    history = History()
    with (
        _keys() as keys,
        contextlib.suppress(KeyboardInterrupt),
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        while True:
            due_s = time.monotonic() + LOOK_S
            seen = status.look(home)
            told = status.as_json(home, seen, status.health(seen))
            history.add(told)
            live.update(draw(told, history, _sheet(console, console.size.height)), refresh=True)
            if _asked_to_quit(keys, due_s):
                return


def _sheet(console: Console, height: int | None) -> Sheet:
    from batchmill.run.top.marks import Sheet

    return Sheet(console.size.width, height, console.options.ascii_only)


def _asked_to_quit(keys: int | None, due_s: float) -> bool:
    """Let time pass; whether somebody wants to quit meanwhile."""
    while (left_s := due_s - time.monotonic()) > 0:
        if keys is None:
            time.sleep(left_s)
            return False
        readable, _, _ = select.select([keys], [], [], left_s)
        if readable:
            pressed = os.read(keys, 64)
            # What ends is a terminal that was closed.
            if not pressed or QUIT.intersection(pressed.decode("utf-8", "replace")):
                return True
    return False


@contextlib.contextmanager
def _keys() -> Iterator[int | None]:
    """Where keys come from as they are pressed; None: from nowhere, Ctrl-C works all the same."""
    try:
        import termios
        import tty
    except ImportError:  # not on this system
        yield None
        return
    if not sys.stdin.isatty():
        yield None
        return
    handle = sys.stdin.fileno()
    before = termios.tcgetattr(handle)
    try:
        tty.setcbreak(handle)
        yield handle
    finally:
        termios.tcsetattr(handle, termios.TCSADRAIN, before)
