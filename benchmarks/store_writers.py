"""Compare commits to PostgreSQL over one connection and over several, on the same batches.

    python -m benchmarks.store_writers [--quick] [--database URL] [--json PATH]

Without ``--database`` it starts a server in a temporary folder, without fsync. Prints a table and
writes all results as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from batchmill.oal import MetricSet, load
from batchmill.sources import Grain
from batchmill.store import Batch, Deltas, EntityRow, Layout, RetryPolicy, encode_numbers
from batchmill.store.postgres import PostgresStore, WriterSettings
from batchmill.store.states import Shape
from benchmarks.machine import machine, machine_line
from benchmarks.report import Table, say, spread, write_json

DEFAULT_JSON = Path(__file__).parent / "results" / "store_writers.json"
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
ONE = "one connection"
FULL = ((1_000, 15), (10_000, 15), (50_000, 11), (100_000, 9), (500_000, 7))
QUICK = ((1_000, 3), (10_000, 3), (50_000, 2))
"""Delta rows of a batch, and how many rounds."""


@dataclass
class Commits:
    """Seconds of a commit, by rows of a batch and by how they came."""

    seconds: Mapping[int, Mapping[str, list[float]]]

    def ratios(self, rows: int, way: str) -> list[float]:
        """To the one connection, round by round."""
        return [
            one / other
            for one, other in zip(self.seconds[rows][way], self.seconds[rows][ONE], strict=True)
        ]

    def table(self) -> Table:
        """What to print."""
        lines = []
        for rows, ways in self.seconds.items():
            for way, seconds in ways.items():
                ratios = self.ratios(rows, way)
                line = [f"{rows:,}", way, f"{median(seconds):.3f}", spread(seconds, 3)]
                best = min(seconds) / min(ways[ONE])
                lines.append([*line, f"{median(ratios):.2f}x", spread(ratios), f"{best:.2f}x"])
        return Table(
            "Commits to PostgreSQL over one connection, and over several",
            f"{len(load(SCRIPT))} metrics of one source; every entity in {MINUTES} new minutes, and"
            " in an existing hour and day. Each number of connections has its own store; they take"
            f" turns. Batches of fewer rows than {WriterSettings().above_rows:,} normally use one"
            " connection; here they use several too, except for parts too small to split. On a busy"
            " machine the best times are closer to those of an idle one.",
            ["delta rows", "way", "s", "range", "to one", "range", "best to best"],
            lines,
        )

    def as_json(self) -> dict[str, Any]:
        """What to keep."""
        return {
            str(rows): {
                way: {"s": seconds, "ratios": self.ratios(rows, way)} for way, seconds in s.items()
            }
            for rows, s in self.seconds.items()
        }


class Lane:
    """A store, and the batches that go to it."""

    def __init__(self, url: str, settings: WriterSettings) -> None:
        self.store = PostgresStore(
            url, url, RetryPolicy(), ttl_days=7, top_n=50, create=True, writers=settings
        )
        self._metrics = load(SCRIPT)
        self._claim = self.store.claim("live", "c", fresh=True, committed=None)
        self._layout = self.store.register(self._metrics, stream="live")
        self._numbers = itertools.count()
        self._minutes = itertools.count(0, MINUTES)

    def batch(self, rows: int) -> Batch:
        """The next batch of so many delta rows."""
        first = next(self._minutes)
        entities = max(1, rows // (MINUTES + 2))
        minutes = [_minute(first + offset) for offset in range(MINUTES)]
        buckets = {
            Grain.MINUTE: [minute for minute in minutes for _ in range(entities)],
            Grain.HOUR: [minutes[0] // 100] * entities,
            Grain.DAY: [minutes[0] // 10_000] * entities,
        }
        named = [
            EntityRow("endpoint", f"id-{n}", f"/endpoint/{n}", frozenset(["GENERAL"]))
            for n in range(entities)
        ]
        deltas = [
            Deltas("Endpoint", grain, some, list(range(entities)) * (len(some) // entities), cells)
            for grain, some in buckets.items()
            for cells in [_cells(self._metrics, self._layout, len(some))]
        ]
        epoch, number = self._claim.epoch, next(self._numbers)
        return Batch("live", epoch, number, minutes[-1], named, deltas)

    def commit(self, rows: int) -> float:
        """The seconds of a commit."""
        batch = self.batch(rows)
        started = perf_counter()
        result = self.store.commit(batch)
        took = perf_counter() - started
        if result.merged != sum(len(deltas.buckets) for deltas in batch.deltas):
            raise RuntimeError(f"{result.merged} rows were merged")
        return took


def _minute(number: int) -> int:
    hours, minute = divmod(number, 60)
    days, hour = divmod(hours, 24)
    return 202403010000 + days * 10_000 + hour * 100 + minute


def _cells(metrics: MetricSet, layout: Layout, rows: int) -> dict[str, list[Any]]:
    rng = random.Random(rows)
    cells: dict[str, list[Any]] = {}
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


def measure(urls: Iterator[str], sizes: Sequence[tuple[int, int]], writers: int) -> Commits:
    """Every size by every way, the ways taking turns."""
    ways = {
        ONE: WriterSettings(writers=1),
        f"{writers} writers": WriterSettings(writers=writers, above_rows=1),
    }
    seconds: dict[int, dict[str, list[float]]] = {}
    for rows, rounds in sizes:
        lanes = {way: Lane(next(urls), settings) for way, settings in ways.items()}
        seconds[rows] = {way: [] for way in ways}
        try:
            for lane in lanes.values():
                lane.commit(rows)  # the first makes entities, connections and tables
            for turn in range(rounds):
                order = list(lanes)[:: 1 if turn % 2 else -1]
                for way in order:
                    seconds[rows][way].append(lanes[way].commit(rows))
            say(f"{rows:,} rows: done")
        finally:
            for lane in lanes.values():
                lane.store.close()
    return Commits(seconds)


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
        name = f"store_writers_{number}"
        with psycopg.connect(given, autocommit=True) as connection:
            connection.execute(f"DROP SCHEMA IF EXISTS {name} CASCADE".encode())
            connection.execute(f"CREATE SCHEMA {name}".encode())
        mark = "&" if "?" in given else "?"
        yield f"{given}{mark}options=-csearch_path%3D{name}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write down."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.store_writers")
    parser.add_argument("--quick", action="store_true", help="a run of seconds, too short to quote")
    parser.add_argument(
        "--database", metavar="URL", help="a database in which new schemas are created"
    )
    parser.add_argument("--writers", type=int, default=WriterSettings().writers)
    parser.add_argument("--json", type=Path, default=DEFAULT_JSON, help="file for the results")
    options = parser.parse_args(arguments)
    print(machine_line())
    with databases(options.database) as urls:
        commits = measure(urls, QUICK if options.quick else FULL, options.writers)
    print("\n" + commits.table().render())
    write_json(
        options.json, {"machine": machine(), "quick": options.quick, "commits": commits.as_json()}
    )
    say(f"results are in {options.json}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
