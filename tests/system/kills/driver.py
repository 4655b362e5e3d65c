"""A pipeline whose driver is killed at chosen moments, with its JVM, until it is through."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.kit.jvm import jvm_options
from tests.kit.pipelines import MIXED_OAL, QUICK_SPARK
from tests.kit.processes import Life

MOST_BATCHES = 4
"""A life is killed after this many commits at the latest: later lives then have something to do."""


@dataclass(frozen=True)
class Shot:
    """When to kill: so long after the driver has said so many lines like that one."""

    after: str
    nth: int
    delay_s: float
    batch_files: int | None = 1

    def __str__(self) -> str:
        return f"{self.delay_s * 1000:.0f} ms after {self.after!r} no. {self.nth}"


@dataclass(frozen=True)
class Death:
    """What the driver was doing when it was killed, by the last that it said."""

    last: str

    @property
    def moment(self) -> str:
        """Of a batch's life, or the driver's."""
        for pattern, moment in (
            (r"commit .* (begin|merged)", "inside a commit"),
            (r"commit .* end|batch .* replayed", "after a commit"),
            (r"batch .* (opened, \d+|making|rerun \d+|made)", "before a commit"),
        ):
            if re.fullmatch(pattern, self.last):
                return moment
        return "at start"


def shots(
    rng: random.Random, *, at_any_time: int, making: int, inside: int, after: int, settling: int
) -> Sequence[Shot]:
    """Random moments of each kind, in random order; those in the last commit are the last."""

    def which() -> int:
        return rng.choice((1, 1, 2))

    halves = (inside // 2, inside - inside // 2)
    made = [
        *(Shot("go", 1, rng.uniform(0, 3)) for _ in range(at_any_time)),
        *(Shot(r"batch \d+ making", which(), rng.uniform(0, 0.5)) for _ in range(making)),
        *(Shot(r"commit \d+ begin", which(), _while_it_commits(rng)) for _ in range(halves[0])),
        *(Shot(r"commit \d+ merged", 1, 0.0) for _ in range(halves[1])),
        *(Shot(r"commit \d+ end", which(), 0.0) for _ in range(after)),
    ]
    rng.shuffle(made)
    settle = (
        Shot("commit settle merged", 1, 0.0, None),
        # The next life runs that batch again, by its number, as any other of the books.
        Shot(r"commit \d+ begin", 1, _while_it_commits(rng), None),
    )
    return [*made, *settle[:settling]]


def _while_it_commits(rng: random.Random) -> float:
    """Up to 15 ms, but mostly a few: a commit of so little is a matter of some milliseconds."""
    return 0.015 * rng.random() ** 2


class KilledRun:
    """One run of the pipeline, through as many lives as it takes.

    The next driver starts its Spark while the one before it is at work. It waits there, and has
    seen nothing of spool, checkpoint and store, until the other is dead. Drivers have one core and
    two in turn.
    """

    def __init__(self, folder: Path, url: str, **given: Any) -> None:
        """``given`` is what the driver is told besides."""
        self._folder = folder
        self._url = url
        self._given = given
        self._born = 0
        self.made_again: set[str] = set()
        self.replayed: set[str] = set()

    def kill_at(self, moments: Sequence[Shot]) -> list[Death]:
        """Kill a driver at each of the moments, and let the one after them come to its end."""
        deaths = []
        made: set[str] = set()
        with contextlib.ExitStack() as lives:
            heir = lives.enter_context(self._life(moments[0]))
            for number, shot in enumerate(moments):
                life = heir
                life.must_hear("ready")
                life.tell("go")
                heir = lives.enter_context(self._life(*moments[number + 1 : number + 2]))
                deaths.append(self._strike(life, shot))
                made |= self._learn(life, made)
                born = next(_numbers(life, r"(claim \w+)"), "before a claim")
                say(f"{number + 1}: {born}; {shot}: {deaths[-1].moment}, at {life.lines[-1]!r}")
            heir.must_hear("ready")
            heir.tell("go")
            heir.must_hear("done")
            heir.end()
            self._learn(heir, made)
        say(f"made again: {sorted(self.made_again)}; replayed: {sorted(self.replayed)}")
        return deaths

    def _strike(self, life: Life, shot: Shot) -> Death:
        if shot.after != "go":
            life.must_hear(shot.after, shot.nth)
        # A fast machine does not get through the spool meanwhile.
        life.hear(r"commit \d+ end", nth=MOST_BATCHES, seconds=shot.delay_s)
        life.kill()
        return Death(life.lines[-1])

    def _learn(self, life: Life, made: set[str]) -> set[str]:
        """Which batches this life made; notes those that a life before it had made too."""
        self.replayed |= set(_numbers(life, r"batch (\d+) replayed"))
        again = set(_numbers(life, r"batch (\w+) made"))
        self.made_again |= again & made
        return again

    @contextlib.contextmanager
    def _life(self, shot: Shot | None = None) -> Iterator[Life]:
        self._born += 1
        with start_driver(
            self._folder,
            self._url,
            self._born,
            master=f"local[{2 - self._born % 2}]",
            batch_files=shot.batch_files if shot else None,
            # The transaction is still open then when the signal comes.
            linger_at=shot.after if shot else "",
            **self._given,
        ) as life:
            yield life


def start_driver(folder: Path, url: str, number: int, **given: Any) -> Life:
    """A driver in a process of its own; ``number`` tells its log from those of others."""
    given = {
        "folder": str(folder),
        "store": url,
        "oal": MIXED_OAL,
        "batch_files": None,
        "linger_at": "",
        "conf": QUICK_SPARK,
        **given,
    }
    return Life(
        [sys.executable, "-m", "tests.kit.pipeline_driver", json.dumps(given)],
        folder / f"driver-{number}.log",
        {**os.environ, "SPARK_SUBMIT_OPTS": jvm_options(), "SPARK_LOCAL_IP": "127.0.0.1"},
    )


def _numbers(life: Life, pattern: str) -> Iterator[str]:
    for line in life.lines:
        if match := re.fullmatch(pattern, line):
            yield match[1]


def say(what: str) -> None:
    """For whoever reads the output: pytest shows it when the test fails, or with -s."""
    sys.stdout.write(f"{what}\n")
