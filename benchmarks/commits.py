"""Compare commits to PostgreSQL: a batch as a whole, and by parts from several tasks.

    python -m benchmarks.commits [--quick] [--old PATH] [--database URL] [--json PATH]

Without ``--database`` it starts a server in a temporary folder, without fsync. Prints a table and
writes all results as JSON. With ``--old``, a checkout of the commit 838e789, the code before
commits by parts takes its turn with the same batches, over one connection and with four writers.
The goal is 2.5 times its rate.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import multiprocessing
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any, Protocol

from batchmill.oal import MetricSet, load
from batchmill.sources import Grain
from batchmill.store import (
    Batch,
    Deltas,
    EntityRow,
    Layout,
    OpenParts,
    PartShare,
    RetryPolicy,
    TaskAddress,
    encode_numbers,
    open_for_task,
)
from batchmill.store.postgres import PostgresStore
from batchmill.store.states import Shape
from benchmarks import RESULTS
from benchmarks.kit.goals import Goal, at_least
from benchmarks.kit.machine import machine, machine_line
from benchmarks.kit.report import Table, say, spread, write_json

DEFAULT_JSON = RESULTS / "commits.json"
SCRIPT = """
calls = from(Endpoint.*).count();
avg = from(Endpoint.latency).longAvg();
slowest = from(Endpoint.latency).max();
quickest = from(Endpoint.latency).min();
percentile = from(Endpoint.latency).percentile2(10);
apdex = from(Endpoint.latency).sum();
"""
MINUTES = 3
"""Each entity has a row in so many minutes of a batch, and one in the hour and one in the day."""
ONE = "as a whole"
NEW = "2 tasks"
"""On two cores."""
OLD = {"before, one connection": "writers=1", "before, 4 writers": "writers=4, above_rows=1"}
"""The ways of the code before, and the settings of its writers."""
LARGE, TIMES = 500_000, 2.5
"""The goal: so many rows at so many times the rate of the code before."""
OLD_LANE = """
import sys, time
from benchmarks.store_writers import Lane
from batchmill.store.postgres import WriterSettings
lane = Lane(sys.argv[1], WriterSettings({settings}))
print("ready", flush=True)
for line in sys.stdin:
    before = time.process_time()
    took = lane.commit(int(line))
    print(took, time.process_time() - before, flush=True)
lane.store.close()
"""
FULL = ((1_000, 9), (10_000, 9), (100_000, 7), (500_000, 7))
QUICK = ((1_000, 3), (10_000, 3), (50_000, 2))
"""Delta rows of a batch, and how many rounds."""


@dataclass(frozen=True)
class Cost:
    """What a commit took."""

    seconds: float
    processor: float
    """Processor seconds of all processes, the server's included, where they can be read."""


@dataclass
class Commits:
    """The commits, by rows of a batch and by how they came."""

    costs: Mapping[int, Mapping[str, list[Cost]]]

    def seconds(self, rows: int, way: str) -> list[float]:
        """Of each round."""
        return [cost.seconds for cost in self.costs[rows][way]]

    def processor(self, rows: int, way: str) -> list[float]:
        """Of each round."""
        return [cost.processor for cost in self.costs[rows][way]]

    def ratios(self, rows: int, way: str) -> list[float]:
        """To a commit as a whole, round by round."""
        pairs = zip(self.seconds(rows, way), self.seconds(rows, ONE), strict=True)
        return [one / other for one, other in pairs]

    @property
    def has_old(self) -> bool:
        """Whether the code before took part."""
        return all(OLD.keys() <= ways.keys() for ways in self.costs.values())

    def rates(self, rows: int) -> list[float]:
        """Of two tasks, to the quicker way of the code before, round by round."""
        turns = zip(*(self.seconds(rows, way) for way in (NEW, *OLD)), strict=True)
        return [min(old) / new for new, *old in turns]

    def goals(self) -> list[Goal]:
        """One for large batches, if the code before took part."""
        if LARGE not in self.costs or not self.has_old:
            return []
        rate = median(self.rates(LARGE))
        what = f"{LARGE:,} delta rows, {NEW}: rate to that of the code before"
        return [at_least(what, rate, TIMES)]

    def table(self) -> Table:
        """What to print."""
        lines = []
        for rows, ways in self.costs.items():
            for way in ways:
                ratios, seconds = self.ratios(rows, way), self.seconds(rows, way)
                line = [f"{rows:,}", way, f"{median(seconds):.3f}", spread(seconds, 3)]
                line += [f"{median(self.processor(rows, way)):.3f}"]
                best = min(seconds) / min(self.seconds(rows, ONE))
                lines.append([*line, f"{median(ratios):.2f}x", spread(ratios), f"{best:.2f}x"])
        return Table(
            "Commits to PostgreSQL as a whole, and by parts",
            f"{len(load(SCRIPT))} metrics of one source; every entity in {MINUTES} new minutes, and"
            " in an existing hour and day. Each way has its own store; they take"
            " turns. On a busy machine the best times are closer to those of an idle one.",
            ["delta rows", "way", "s", "range", "processor s", "to one", "range", "best to best"],
            lines,
        )

    def as_json(self) -> dict[str, Any]:
        """What to keep."""
        return {
            str(rows): {
                way: {
                    "s": self.seconds(rows, way),
                    "ratios": self.ratios(rows, way),
                    "processor_s": self.processor(rows, way),
                }
                for way in ways
            }
            for rows, ways in self.costs.items()
        }


class Way(Protocol):
    """A way of committing batches to a store of its own."""

    def commit(self, rows: int) -> Cost:
        """Commit the next batch."""

    def close(self) -> None:
        """End it."""


class Lane:
    """A store, and the batches that the driver commits to it."""

    def __init__(self, url: str) -> None:
        self.store = open_lane(url)
        self._metrics = load(SCRIPT)
        self._claim = self.store.claim("live", "c", fresh=True, committed=None)
        self._layout = self.store.register(self._metrics, stream="live")
        self._numbers = itertools.count()
        self._minutes = itertools.count(0, MINUTES)

    def batch(self, rows: int) -> Batch:
        """The next batch of so many delta rows."""
        batch = make_batch(self._metrics, self._layout, rows, next(self._minutes))
        batch.epoch, batch.number = self._claim.epoch, next(self._numbers)
        return batch

    def commit(self, rows: int) -> Cost:
        """Commit the next batch."""
        batch = self.batch(rows)
        server = server_seconds(self.store)
        client, started = process_time(), perf_counter()
        result = self.store.commit(batch)
        took, client = perf_counter() - started, process_time() - client
        if result.merged != delta_rows(batch):
            raise RuntimeError(f"{result.merged} rows were merged")
        return Cost(took, client + server_seconds(self.store) - server)

    def close(self) -> None:
        """Close the store."""
        self.store.close()


class OldLane:
    """A store of the code before, which has a process of its own."""

    def __init__(self, url: str, checkout: Path, settings: str, watch: PostgresStore) -> None:
        """``watch``: a store that sees the processes of the server."""
        self._watch = watch
        paths = os.pathsep.join((str(checkout / "src"), str(checkout)))
        self._process = subprocess.Popen(
            [sys.executable, "-c", OLD_LANE.format(settings=settings), url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": paths},
        )
        self._line()

    def commit(self, rows: int) -> Cost:
        """Commit the next batch."""
        assert self._process.stdin is not None
        server = server_seconds(self._watch)
        self._process.stdin.write(f"{rows}\n")
        self._process.stdin.flush()
        took, client = map(float, self._line().split())
        return Cost(took, client + server_seconds(self._watch) - server)

    def close(self) -> None:
        """End the process, which closes its store."""
        self._process.communicate()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the code before ended with {self._process.wait()}")
        return line


@dataclass(frozen=True)
class Order:
    """What a task is to commit."""

    rows: int
    first: int
    """The first minute."""
    epoch: int
    number: int
    opened: OpenParts


class TaskLane:
    """A store, and batches that processes commit to it by parts; the driver keeps the books."""

    def __init__(self, url: str, tasks: int) -> None:
        self.store = open_lane(url)
        self._claim = self.store.claim("live", "c", fresh=True, committed=None)
        layout = self.store.register(load(SCRIPT), stream="live")
        self._numbers = itertools.count()
        self._minutes = itertools.count(0, MINUTES)
        processes = multiprocessing.get_context("spawn")
        self._tasks: list[Connection] = []
        for part in range(tasks):
            ours, theirs = processes.Pipe()
            arguments = (theirs, self.store.task_address(), layout, part)
            processes.Process(target=run_task, args=arguments, daemon=True).start()
            self._tasks.append(ours)

    def commit(self, rows: int) -> Cost:
        """Commit the next batch: its parts, and then the books."""
        epoch, number, first = self._claim.epoch, next(self._numbers), next(self._minutes)
        opened = self.store.begin_parts("live", epoch, number)
        for task in self._tasks:
            task.send(Order(rows // len(self._tasks), first, epoch, number, opened))
        for task in self._tasks:
            task.recv()  # it has its rows
        server = server_seconds(self.store)
        client, started = process_time(), perf_counter()
        for task in self._tasks:
            task.send(None)
        spent = [task.recv() for task in self._tasks]
        newest = _minute(first + MINUTES - 1)
        parts = len(self._tasks)
        result = self.store.commit(Batch("live", epoch, number, newest, parts=parts))
        took, client = perf_counter() - started, process_time() - client + sum(spent)
        if not result.applied or abs(result.merged - rows) > parts * (MINUTES + 2):
            raise RuntimeError(f"{result.merged} rows were merged")
        return Cost(took, client + server_seconds(self.store) - server)

    def close(self) -> None:
        """End the processes and close the store."""
        for task in self._tasks:
            task.close()
        self.store.close()


def run_task(orders: Connection, address: TaskAddress, layout: Layout, part: int) -> None:
    """What each process does: commit a part, and say how many processor seconds it took."""
    store = open_for_task(address)
    metrics = load(SCRIPT)
    with contextlib.suppress(EOFError):
        while True:
            order: Order = orders.recv()
            batch = make_batch(metrics, layout, order.rows, order.first, f"{part}-")
            batch.deltas = [_as_arrow(deltas) for deltas in batch.deltas]
            batch.epoch, batch.number = order.epoch, order.number
            orders.send(None)
            orders.recv()
            started = process_time()
            result = store.commit_parts(batch, PartShare((part,), order.opened, {}, layout))
            orders.send(process_time() - started)
            if result.merged != delta_rows(batch):
                raise RuntimeError(f"{result.merged} rows were merged")


def open_lane(url: str) -> PostgresStore:
    """An empty store."""
    return PostgresStore(url, url, RetryPolicy(), ttl_days=7, top_n=50, create=True)


def delta_rows(batch: Batch) -> int:
    """How many delta rows a batch has."""
    return sum(len(deltas.buckets) for deltas in batch.deltas)


def server_seconds(store: PostgresStore) -> float:
    """Processor seconds of all the server's processes so far; 0 where they cannot be read."""
    seconds = 0.0
    query = "SELECT pid FROM pg_stat_activity"
    for (pid,) in store._read(lambda session: session.rows(query)):
        with contextlib.suppress(OSError):
            seconds += int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
    return seconds


def make_batch(metrics: MetricSet, layout: Layout, rows: int, first: int, mark: str = "") -> Batch:
    """A batch of so many delta rows."""
    entities = max(1, rows // (MINUTES + 2))
    minutes = [_minute(first + offset) for offset in range(MINUTES)]
    buckets = {
        Grain.MINUTE: [minute for minute in minutes for _ in range(entities)],
        Grain.HOUR: [minutes[0] // 100] * entities,
        Grain.DAY: [minutes[0] // 10_000] * entities,
    }
    named = [
        EntityRow("endpoint", f"id-{mark}{n}", f"/endpoint/{mark}{n}", frozenset(["GENERAL"]))
        for n in range(entities)
    ]
    deltas = [
        Deltas("Endpoint", grain, some, list(range(entities)) * (len(some) // entities), cells)
        for grain, some in buckets.items()
        for cells in [_cells(metrics, layout, len(some))]
    ]
    return Batch("live", 0, 0, minutes[-1], named, deltas)


def _as_arrow(deltas: Deltas) -> Deltas:
    import pyarrow as pa

    cells = {name: pa.array(values) for name, values in deltas.cells.items()}
    buckets, entities = pa.array(deltas.buckets), pa.array(deltas.entities)
    return Deltas(deltas.source, deltas.grain, buckets, entities, cells)


def _minute(number: int) -> int:
    hours, minute = divmod(number, 60)
    days, hour = divmod(hours, 24)
    return 202403010000 + days * 10_000 + hour * 100 + minute


_CELLS: dict[int, dict[str, list[Any]]] = {}
"""Made once for each number of rows: every batch has the same."""


def _cells(metrics: MetricSet, layout: Layout, rows: int) -> dict[str, list[Any]]:
    if rows in _CELLS:
        return _CELLS[rows]
    cells = _CELLS[rows] = {}
    rng = random.Random(rows)
    tallies = [
        encode_numbers({rng.randrange(200): rng.randrange(1, 9) for _ in range(6)})
        for _ in range(500)
    ]
    for metric in metrics:
        counted = any(Shape.of(state) is Shape.NUMBERS for state in metric.states)
        for column in layout.columns[metric.name]:
            if counted:
                cells[column] = [tallies[n % len(tallies)] for n in range(rows)]
            else:
                cells[column] = [rng.randrange(10**5) for _ in range(rows)]
    return cells


def measure(
    urls: Iterator[str],
    sizes: Sequence[tuple[int, int]],
    tasks: Sequence[int] = (2, 4),
    old: Path | None = None,
) -> Commits:
    """Every size by every way, the ways taking turns; ``old``: a checkout of the code before."""
    costs: dict[int, dict[str, list[Cost]]] = {}
    for rows, rounds in sizes:
        whole = Lane(next(urls))
        lanes: dict[str, Way] = {
            ONE: whole,
            **{f"{count} tasks": TaskLane(next(urls), count) for count in tasks},
        }
        if old is not None:
            for name, settings in OLD.items():
                lanes[name] = OldLane(next(urls), old, settings, whole.store)
        costs[rows] = {way: [] for way in lanes}
        try:
            for lane in lanes.values():
                lane.commit(rows)  # the first makes entities, connections and tables
            for turn in range(rounds):
                order = list(lanes)[:: 1 if turn % 2 else -1]
                for way in order:
                    costs[rows][way].append(lanes[way].commit(rows))
            say(f"{rows:,} rows: done")
        finally:
            for lane in lanes.values():
                lane.close()
    return Commits(costs)


@contextlib.contextmanager
def databases(given: str | None) -> Iterator[Iterator[str]]:
    """Addresses of empty databases, on the server that is given, or on one of our own."""
    if given is None:
        from tests.kit.servers.postgres import MISSING, make_postgres

        server = make_postgres()
        if server is None:
            raise SystemExit(MISSING)
        try:
            yield iter(server.new_database, "")
        finally:
            server.drop_all()
    else:
        yield _made_in(given)


def _made_in(given: str) -> Iterator[str]:
    """New schemas of one database: every store lives in the first of its search path."""
    import psycopg

    for number in itertools.count(1):
        name = f"commits_{number}"
        with psycopg.connect(given, autocommit=True) as connection:
            connection.execute(f"DROP SCHEMA IF EXISTS {name} CASCADE".encode())
            connection.execute(f"CREATE SCHEMA {name}".encode())
        mark = "&" if "?" in given else "?"
        yield f"{given}{mark}options=-csearch_path%3D{name}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write down."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.commits")
    parser.add_argument("--quick", action="store_true", help="a run of seconds, too short to quote")
    parser.add_argument(
        "--database", metavar="URL", help="a database in which new schemas are created"
    )
    parser.add_argument(
        "--old",
        type=Path,
        metavar="PATH",
        help="a checkout of the commit 838e789 (git worktree add PATH 838e789)",
    )
    parser.add_argument("--rows", type=int, help="only batches of so many delta rows")
    parser.add_argument("--json", type=Path, default=DEFAULT_JSON, help="file for the results")
    options = parser.parse_args(arguments)
    print(machine_line())
    with databases(options.database) as urls:
        sizes: Sequence[tuple[int, int]] = QUICK if options.quick else FULL
        if options.rows:
            sizes = [(options.rows, sizes[-1][1])]
        commits = measure(urls, sizes, old=options.old and options.old.resolve())
    print("\n" + commits.table().render())
    goals = commits.goals()
    if goals:
        caption = "The median over the rounds. A missed goal does not fail the run."
        rows = [goal.row() for goal in goals]
        print("\n" + Table("Goals", caption, ["goal", "limit", "measured", ""], rows).render())
    document: dict[str, Any] = {
        "machine": machine(),
        "quick": options.quick,
        "goals": [goal.as_json() for goal in goals],
        "commits": commits.as_json(),
    }
    if commits.has_old:
        document["rates_to_old"] = {str(rows): commits.rates(rows) for rows in commits.costs}
    write_json(options.json, document)
    say(f"results are in {options.json}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
