"""A real ``batchmill run`` whose processes are killed at moments of a plan."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from batchmill.files import read_json
from batchmill.run import Home
from tests.kit.jvm import jvm_options
from tests.kit.pipelines import QUICK_SPARK
from tests.kit.processes import Life
from tests.kit.threads import PATIENCE_S, until

T = TypeVar("T")


@dataclass(frozen=True)
class Strike:
    """Whom to kill, and when: so long after ``after``.

    That is ``now``, or the pipeline being ``ready``, or its next ``commit``.
    """

    victim: str
    after: str
    delay_s: float
    alone: bool = True
    """False: the JVM is killed in the same moment, and not by whoever notices the death."""

    def __str__(self) -> str:
        return f"{self.victim}, {self.delay_s:.2f} s after {self.after}"


class Road:
    """A run, through as many lives of everything in it as it takes."""

    def __init__(self, home: Home, ports: tuple[int, int], script: Path) -> None:
        self._home = home
        self._log = home.folder.parent
        self._command = [
            *(sys.executable, "-m", "batchmill", "run", "--no-web", f"--home={home.folder}"),
            *(f"--http-port={ports[0]}", f"--grpc-port={ports[1]}"),
            *("--master=local[2]", "--dedup=10m", "--trigger=0.2", "--drain=100"),
            f"--oal={script}",
            *(f"--conf={key}={value}" for key, value in QUICK_SPARK.items()),
        ]
        self._born = 0
        self._dead: set[int] = set()
        self._life = self._start()
        self.died: list[str] = []
        """What was killed, in order."""

    @contextlib.contextmanager
    def going(self) -> Iterator[None]:
        """Nothing of it is left in the end, whatever happens."""
        try:
            yield
        finally:
            self._life.kill()
            # What it had started is on its way out: the next to have the folder waits for that.
            with self._home.locked(PATIENCE_S):
                pass

    def strike(self, strike: Strike) -> None:
        """Kill what is to be killed, when it is time to."""
        if strike.after == "ready":
            self.await_pipeline()
        elif strike.after == "commit":
            self._await_commit()
        time.sleep(strike.delay_s)  # the moment itself is what is random
        if strike.victim == "supervisor":
            self._life.kill()
            self._life = self._start()
        else:
            pid = self.until(lambda: self._alive(strike.victim))
            self._dead.add(pid)
            (os.kill if strike.alone else os.killpg)(pid, signal.SIGKILL)
        self.died.append(strike.victim)
        say(f"{len(self.died)}: killed {strike}")

    def await_pipeline(self) -> None:
        """Wait until it takes segments."""
        self.until(lambda: self._alive("pipeline", "running"))

    def await_ingest(self) -> None:
        """Wait until it takes requests."""
        self.until(lambda: self._alive("ingest", "running"))

    def end(self) -> None:
        """End it in order: it reads its spool before."""
        os.kill(self._life.pid, signal.SIGTERM)
        self._life.end(0)

    def report(self) -> str:
        """What was said last."""
        logs = [self._life.report()]
        for name in ("run", "ingest", "pipeline"):
            with contextlib.suppress(OSError):
                lines = (self._home.log / f"{name}.log").read_text("utf-8", "replace").splitlines()
                logs += [f"{name}.log:", *lines[-25:]]
        return "\n".join(logs)

    def until(self, done: Callable[[], T]) -> T:
        """Wait for what happens in other processes; the error has their last output."""
        return until(done, self.report)

    def _await_commit(self) -> None:
        def last() -> Any:
            return (read_json(self._home.progress) or {}).get("last_batch")

        before = last()
        self.until(lambda: last() != before)

    def _alive(self, name: str, *states: str) -> int:
        """A process of this run that was not killed yet; 0: there is none at the moment."""
        report = read_json(self._home.supervisor) or {}
        process = report.get("processes", {}).get(name, {})
        pid = process.get("pid")
        if report.get("pid") != self._life.pid or not pid or pid in self._dead:
            return 0
        if states and process["state"] not in states:
            return 0
        try:
            # It leads a session of its own; whoever else may have its number by now does not.
            return int(pid) if os.getsid(pid) == pid else 0
        except ProcessLookupError:
            return 0

    def _start(self) -> Life:
        self._born += 1
        return Life(
            self._command,
            self._log / f"run-{self._born}.log",
            {**os.environ, "SPARK_SUBMIT_OPTS": jvm_options(), "SPARK_LOCAL_IP": "127.0.0.1"},
        )


def few_strikes(rng: random.Random) -> Sequence[Strike]:
    """One of each kind that matters, at random moments."""
    return [
        Strike("ingest", "now", rng.uniform(0, 2)),
        Strike("pipeline", "ready", rng.uniform(0, 3)),
        Strike("ingest", "now", rng.uniform(0, 2)),
        Strike("pipeline", "commit", rng.uniform(0, 0.5), alone=False),
        Strike("ingest", "now", rng.uniform(0, 1)),
        Strike("supervisor", "commit", rng.uniform(0, 0.5)),
        Strike("ingest", "now", rng.uniform(0, 5)),
    ]


def many_strikes(rng: random.Random, n: int) -> Sequence[Strike]:
    """Anything, at any moment."""

    def one() -> Strike:
        victim = rng.choices(("ingest", "pipeline", "supervisor"), (3, 2, 1))[0]
        after = rng.choice(("now", "ready", "commit"))
        return Strike(victim, after, rng.uniform(0, 4), alone=rng.random() < 0.5)

    return [*few_strikes(rng), *(one() for _ in range(n))]


def say(what: str) -> None:
    """For whoever reads the output: pytest shows it when the test fails, or with -s."""
    sys.stdout.write(f"{what}\n")
