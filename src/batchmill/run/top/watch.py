"""Draws the status of a run once, or each second until a key ends it."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Iterator

from rich.console import Console
from rich.live import Live

from batchmill.run.home import Home
from batchmill.run.status import read_status
from batchmill.run.top.history import History
from batchmill.run.top.marks import Sheet
from batchmill.run.top.view import draw

EVERY_S = 1.0
PLAIN_WIDTH = 100
QUIT = frozenset("qQ\x03\x04")
"""q, Ctrl-C and Ctrl-D."""


def show_run(home: Home, *, once: bool = False) -> int:
    """Watch a run until a key ends it; the exit code.

    With ``once``, and where there is no terminal, print its status and return its health.
    """
    console = Console()
    if not sys.stdout.isatty():
        # No colours in a pipe or a file, whatever FORCE_COLOR says.
        console = Console(force_terminal=False, color_system=None, width=PLAIN_WIDTH)
    if once or not console.is_terminal or console.is_dumb_terminal:
        status = read_status(home)
        console.print(draw(status.as_json(), History(), _sheet(console, None)))
        return status.health
    _watch(home, console)
    return 0


def _watch(home: Home, console: Console) -> None:
    history = History()
    with (
        _keys() as keys,
        contextlib.suppress(KeyboardInterrupt),
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        while True:
            due_s = time.monotonic() + EVERY_S
            status = read_status(home).as_json()
            history.add(status)
            live.update(draw(status, history, _sheet(console, console.size.height)), refresh=True)
            if _quit_pressed(keys, due_s):
                return


def _sheet(console: Console, height: int | None) -> Sheet:
    return Sheet(console.size.width, height, console.options.ascii_only)


def _quit_pressed(keys: int | None, until_s: float) -> bool:
    """Wait until then; True as soon as a key asks to quit."""
    while (left_s := until_s - time.monotonic()) > 0:
        if keys is None:
            time.sleep(left_s)
            return False
        readable, _, _ = select.select([keys], [], [], left_s)
        if readable:
            pressed = os.read(keys, 64)
            # Nothing to read: the terminal was closed.
            if not pressed or QUIT.intersection(pressed.decode("utf-8", "replace")):
                return True
    return False


@contextlib.contextmanager
def _keys() -> Iterator[int | None]:
    """A handle to read keys from as they are pressed; None: there is none, only Ctrl-C works."""
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
