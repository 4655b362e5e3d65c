"""What a long past does to a start: ``python -m benchmarks.checkpoint [--quick] [--names N]``.

Starts ``batchmill pipeline`` three times on the same kind of spool, with a heap of 1 GiB: with a
new checkpoint, with one of version 1 whose log of files has 20 million names of segments and a year
of batches (one in ten seconds), and once more with what the second start has made of it. Prints the
seconds until the first batch is committed, the memory of the driver and of the JVM after ten more
batches, and how long those took. A goal is missed, and the exit code is 1, if the old checkpoint
takes more than 30 s to start, or more memory or time for a batch than the new one. The log takes
2.3 GB of the folder for temporary files; ``--quick`` has 100,000 names, to try it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import sqlite3
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from benchmarks import RESULTS
from benchmarks.ingest.receiver import scratch
from benchmarks.ingest.road import StoreView, pipeline_of
from benchmarks.kit.goals import Goal, at_most
from benchmarks.kit.machine import machine, machine_line, processes_below
from benchmarks.kit.report import Table, say, write_json
from benchmarks.road.flood import fill

NEW, OLD, AGAIN = "new", "version 1", "taken over"
HEAP = "1g"
NAMES, QUICK_NAMES = 20_000_000, 100_000
YEAR_OF_BATCHES = 365 * 24 * 60 * 6
MOST_START_S = 30.0
GROWTH, SLACK_MIB, SLACK_S = 1.2, 64.0, 0.5
"""What an old checkpoint may take more than a new one: memory, seconds of a batch."""
_BATCHES = 10
_SPANS = 1_000
_PATIENCE_S = 600.0
_POLL_S = 0.02
_numbers = itertools.count()
"""So that no span comes twice."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of a pipeline, and its next batches."""

    checkpoint: str
    start_s: float
    """From the start of the process until its first batch was committed."""
    driver_mib: float
    """The most memory that the driver ever had."""
    jvm_mib: float
    batches_s: list[float]
    """From a segment in the spool to its commit."""


def make_old(home: Path, names: int) -> None:
    """Turn a checkpoint and its store into those of a stream with a long past in version 1."""
    checkpoint, last = home / "checkpoint", YEAR_OF_BATCHES
    (checkpoint / "books.jsonl").unlink()
    spark = checkpoint / "spark"
    log = spark / "sources" / "0"
    for folder in (spark / "offsets", spark / "commits", log):
        folder.mkdir(parents=True)
    # Spark keeps a hundred of them.
    for number in range(last - 99, last + 1):
        (spark / "commits" / str(number)).write_text("v1\n{}")
        (spark / "offsets" / str(number)).write_text(f'v1\n{{}}\n{{"logOffset":{number}}}')
    spool = (home / "spool" / "Span").as_uri()
    with (log / f"{last}.compact").open("w") as file:
        file.write("v1")
        for first in range(0, names, 10_000):
            file.writelines(
                f'\n{{"path":"{spool}/{number:020}.parquet","timestamp":1,'
                f'"batchId":{number * last // names}}}'
                for number in range(first, min(names, first + 10_000))
            )
    with contextlib.closing(sqlite3.connect(home / "metrics.db")) as store, store:
        store.execute("UPDATE stream SET last_batch = ?", (last,))


def measure(home: Path, name: str) -> Start:
    """Start the pipeline with a segment in its spool; then a segment at a time."""
    store = StoreView(home / "metrics.db")
    began = time.monotonic()
    counted = store.counted()
    fill(home / "spool", _SPANS, next(_numbers))
    with pipeline_of(home, "--conf", f"spark.driver.memory={HEAP}") as pipeline:
        counted = _wait(pipeline, store, counted)
        start_s = time.monotonic() - began
        say(f"{name}: the first batch was committed after {start_s:.1f} s")
        batches = []
        for _ in range(_BATCHES):
            fill(home / "spool", _SPANS, next(_numbers))
            began = time.monotonic()
            counted = _wait(pipeline, store, counted)
            batches.append(round(time.monotonic() - began, 3))
        children = [pid for pid in processes_below(pipeline.pid) if _is_jvm(pid)]
        return Start(
            checkpoint=name,
            start_s=round(start_s, 2),
            driver_mib=round(_peak_mib(pipeline.pid), 1),
            jvm_mib=round(sum(map(_peak_mib, children)), 1),
            batches_s=batches,
        )


def _wait(pipeline: subprocess.Popen[str], store: StoreView, before: int) -> int:
    """Until more spans are counted; how many there are."""
    deadline = time.monotonic() + _PATIENCE_S
    while (counted := store.counted()) < before + _SPANS:
        if pipeline.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{counted:,} spans counted, after {before:,}: see pipeline.log")
        time.sleep(_POLL_S)
    return counted


def _is_jvm(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"java" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
    return False


def _peak_mib(pid: int) -> float:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    return math.nan


def goals_of(starts: Sequence[Start]) -> list[Goal]:
    """What an old checkpoint may take: in memory and time beside a new one, which is the first."""
    new, *others = starts
    goals = []
    for start in others:
        name = start.checkpoint
        what = f"{name}: start to the first commit"
        goals.append(at_most(what, start.start_s, MOST_START_S, " s"))
        for figure, process in (("driver_mib", "the driver's Python"), ("jvm_mib", "the JVM")):
            mib, most = getattr(start, figure), GROWTH * getattr(new, figure) + SLACK_MIB
            goals.append(at_most(f"{name}: peak memory of {process}", mib, most, " MiB"))
        took, most = median(start.batches_s), GROWTH * median(new.batches_s) + SLACK_S
        goals.append(at_most(f"{name}: a batch, median", took, most, " s"))
    return goals


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint", description=__doc__)
    parser.add_argument("--names", type=int, default=NAMES, help="in the log of version 1")
    parser.add_argument("--quick", action="store_true", help="100,000 names, not to quote")
    parser.add_argument(
        "--json", type=Path, help="file for the results; of a full run, in benchmarks/results"
    )
    given = parser.parse_args()
    if given.quick:
        given.names = QUICK_NAMES
    if given.json is None and given.names == NAMES:
        given.json = RESULTS / "checkpoint.json"
    print(machine_line())
    with scratch() as home:
        starts = [measure(home, NEW)]
        say(f"writing a log of {given.names:,} names")
        make_old(home, given.names)
        starts += [measure(home, OLD), measure(home, AGAIN)]
        left = sorted(file.name for file in (home / "checkpoint").iterdir())
    headers = ["checkpoint", "start, s", "driver, MiB", "JVM, MiB", "a batch, s", "slowest, s"]
    rows = [
        [
            start.checkpoint,
            f"{start.start_s:.1f}",
            f"{start.driver_mib:.0f}",
            f"{start.jvm_mib:.0f}",
            f"{median(start.batches_s):.2f}",
            f"{max(start.batches_s):.2f}",
        ]
        for start in starts
    ]
    about = f"{given.names:,} names of segments, {YEAR_OF_BATCHES:,} batches, a heap of {HEAP}."
    print("\n" + Table("A checkpoint with a long past", about, headers, rows).render())
    if "spark" in left:
        raise RuntimeError(f"the log of version 1 is still there: {left}")
    goals = goals_of(starts)
    caption = "In memory and for a batch: 1.2 times what the new checkpoint takes, and a slack."
    lines = [goal.row() for goal in goals]
    print("\n" + Table("Goals", caption, ["goal", "limit", "measured", ""], lines).render())
    document = {
        "machine": machine(),
        "quick": given.names != NAMES,
        "goals": [goal.as_json() for goal in goals],
        "names": given.names,
        "batches": YEAR_OF_BATCHES,
        "starts": [asdict(start) for start in starts],
    }
    if given.json:
        write_json(given.json, document)
    return 1 if any(goal.verdict == "MISSED" for goal in goals) else 0


if __name__ == "__main__":
    sys.exit(main())
