"""A supervisor in a process of its own, for tests of its death and of Ctrl-C.

``python -m tests.run.supervisor_process HOME CHILD…``: a CHILD is ``name=words``, which
``child.py`` does; that of the name ``ingest`` is essential. It says what happens, ``ready NAME``
once a child runs, and ``up PID…`` once all of them do. SIGTERM or Ctrl-C
asks them to end; a second one kills them. It ends with how each of them did.
"""

from __future__ import annotations

import sys
from pathlib import Path

from batchmill.run.home import Home
from batchmill.run.signals import Signals
from batchmill.run.supervisor import (
    GaveUpError,
    RestartPolicy,
    RotatingLog,
    Spec,
    State,
    Supervisor,
)

CHILD = str(Path(__file__).with_name("child.py"))


def say(text: str) -> None:
    """A line for the test."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def run(folder: Path, children: list[str]) -> None:
    """Supervise until a signal comes."""
    home = Home(folder)
    home.prepare()
    policy = RestartPolicy(initial_s=0.01, failed_max_s=0.1, failed_starts=3)

    def log(name: str) -> RotatingLog:
        return RotatingLog(home.log / f"{name}.log", limit=10_000, files=2)

    with (
        home.locked() as inherit,
        Signals() as signals,
        Supervisor(inherit=inherit, log=log, say=say, policy=policy) as supervisor,
    ):
        for child in children:
            name, _, words = child.partition("=")
            ready = "hang" if "hang" in words else "stubborn" if "stubborn" in words else None
            supervisor.start(
                Spec(
                    name=name,
                    target=CHILD,
                    arguments=words.split(),
                    ready_line=ready,
                    essential=name == "ingest",
                )
            )
        processes = supervisor.processes.values()
        announced: list[int | None] = []
        ready_names: set[str] = set()
        try:
            while not signals.count:
                supervisor.poll()
                for process in processes:
                    name = process.spec.name
                    if process.state is State.RUNNING and name not in ready_names:
                        ready_names.add(name)
                        say(f"ready {name}")
                pids = [process.pid for process in processes]
                if pids != announced and all(
                    process.state is State.RUNNING for process in processes
                ):
                    announced = pids
                    say(" ".join(["up", *map(str, pids)]))
                signals.wait(0.02)
        except GaveUpError as error:
            say(str(error))
            return
        say("asked")
        for process in processes:
            process.terminate()
        while signals.count < 2 and any(process.state is State.STOPPING for process in processes):
            supervisor.poll()
            signals.wait(0.02)
    for process in processes:
        say(f"{process.spec.name} {process.state.value} {process.code}")


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2:])
