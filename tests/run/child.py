"""A child of a supervisor, for tests: run by its path, it does what its arguments say, in order.

``say TEXT``, ``exit CODE``, ``hang`` (until SIGTERM, which ends it with 0), ``stubborn`` (SIGTERM
changes nothing), ``spawn FILE`` (starts a process of its own and writes its number to FILE),
``once FILE`` (only if FILE is there already, the rest is done; else it is made, and it exits 3),
``need FILE`` (the same, but it is not made).
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path


def say(text: str) -> None:
    """A line for the log."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def run(words: list[str]) -> None:
    """Do it."""
    while words:
        what = words.pop(0)
        if what == "say":
            say(words.pop(0))
        elif what == "exit":
            sys.exit(int(words.pop(0)))
        elif what == "once":
            file = Path(words.pop(0))
            if not file.exists():
                file.touch()
                sys.exit(3)
        elif what == "need":
            file = Path(words.pop(0))
            if not file.exists():
                say(f"no {file}")
                sys.exit(3)
        elif what == "spawn":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            Path(words.pop(0)).write_text(str(child.pid))
        else:
            handler = signal.SIG_IGN if what == "stubborn" else lambda *_: sys.exit(0)
            signal.signal(signal.SIGTERM, handler)
            say(what)
            with contextlib.suppress(KeyboardInterrupt):
                time.sleep(600)
            sys.exit(9)  # nobody is to press Ctrl-C in a session of its own


if __name__ == "__main__":
    run(sys.argv[1:])
