"""The parts of a batch in two PostgreSQL databases, and in one: the same rows, and what it costs.

The pipeline has no option for it. Here the steps of its job run by hand, and each task commits its
parts into the database that they belong to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import functions as F

from batchmill.oal import MetricSet, load
from batchmill.sources import Grain
from batchmill.spark import PipelineSettings
from batchmill.spark.batch.merge import CommitStep, PartCommit
from batchmill.spark.batch.plan import Limits, PickledPlan, TaskPlan
from batchmill.spark.batch.read_step import ReadStep
from batchmill.spark.batch.report import TaskReport
from batchmill.spark.batch.writer import aggregators_for
from batchmill.spark.shuffle import COLUMNS, Kind, read_blobs
from batchmill.store import Batch, Layout, PartShare, Store, open_store
from benchmarks.kit.report import Table, say, spread
from benchmarks.pipeline.data import SIX, SOURCE
from benchmarks.scale.batches import SEGMENTS, Case, spool_of
from benchmarks.scale.cluster import EXECUTORS, POSTGRES, Session, spent

PARTS, TASKS = 16, 4
STREAM = "main"
_COMPARED = ("endpoint_cpm", "endpoint_resp_time", "endpoint_percentile", "endpoint_max")


@dataclass(frozen=True)
class ShardStep:
    """The last step of a batch: a task commits into the database of its parts."""

    steps: Sequence[CommitStep]
    """For each database. There are as many tasks as databases, or a multiple of that."""

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        task = context.partitionId()
        return self.steps[task % len(self.steps)].run(task, batches)


class Shards:
    """Databases that share the parts of one stream: part n is in that of number n % databases."""

    def __init__(self, session: Session, urls: Sequence[str]) -> None:
        self._session = session
        self._urls = urls
        self.stores = [open_store(url) for url in urls]
        metrics: MetricSet = load(SIX)
        settings = PipelineSettings(max_new_entities=0, max_entities=0)
        self._claims = [
            store.claim(STREAM, "shards", fresh=True, committed=None) for store in self.stores
        ]
        layouts = [store.register(metrics, stream=STREAM) for store in self.stores]
        self._layout: Layout = layouts[0]
        self._plan = TaskPlan(
            metrics.catalog, aggregators_for(metrics, settings), None, settings, PARTS, layouts[0]
        )
        self._shipped = PickledPlan(self._plan)

    def run(self, number: int, paths: Sequence[str], quarantine: Path) -> None:
        """Read the segments, and commit the batch everywhere."""
        commits = [
            PartCommit(
                store.task_address(),
                STREAM,
                claim.epoch,
                number,
                store.begin_parts(STREAM, claim.epoch, number),
                None,
            )
            for store, claim in zip(self.stores, self._claims, strict=True)
        ]
        report = self._job(commits, paths, quarantine)
        for failure in report.failures:
            raise failure
        read = sum(report.events.values())
        counted = [self._commit_books(place, commit) for place, commit in enumerate(commits)]
        if sum(counted) != read:
            raise RuntimeError(f"{read:,} rows were read, {counted} are in the databases")

    def _job(
        self, commits: Sequence[PartCommit], paths: Sequence[str], quarantine: Path
    ) -> TaskReport:
        limits = Limits(2**62, None, str(quarantine))
        slices = [tuple(paths[place::TASKS]) for place in range(TASKS)]
        steps = [CommitStep(self._shipped, commit, TASKS) for commit in commits]
        blobs = (
            self._session.spark.range(0, TASKS, 1, TASKS)
            .mapInArrow(ReadStep(self._shipped, limits, slices), COLUMNS)
            .repartitionById(TASKS, F.col("part") % TASKS)
            .mapInArrow(ShardStep(steps), COLUMNS)
        )
        report = TaskReport()
        for blob in read_blobs(blobs.toArrow().to_batches()):
            if blob.kind is Kind.REPORT:
                report.add(blob.report)
        return report

    def _commit_books(self, place: int, commit: PartCommit) -> int:
        """Close the batch in a database: nothing of it has parts of the others."""
        store = self.stores[place]
        epoch, number = commit.epoch, commit.number
        others = tuple(part for part in range(PARTS) if part % len(self.stores) != place)
        if others:
            nothing = PartShare(others, commit.opened, {}, self._layout)
            store.commit_parts(Batch(STREAM, epoch, number), nothing)
        rows = self._rows_in(place)
        books = Batch(STREAM, epoch, number, parts=PARTS, expected_rows={SOURCE: rows})
        store.commit(books)
        return rows

    def _rows_in(self, place: int) -> int:
        import psycopg

        with psycopg.connect(self._urls[place]) as connection:
            query = f"SELECT coalesce(sum((n_rows::json->>'{SOURCE}')::bigint), 0) FROM part_commit"
            ((rows,),) = connection.execute(query.encode()).fetchall()
            return int(rows)

    def close(self) -> None:
        for store in self.stores:
            store.close()


@dataclass(frozen=True)
class ShardTurn:
    """A batch: the processor seconds of its executors and of the servers."""

    databases: int
    executors: float
    postgres: float


@dataclass
class Sharded:
    """Batches in one database and in two, and whether two have together what one has."""

    case: Case
    turns: list[ShardTurn]
    values: int
    """Values of metrics that were compared, of all grains."""
    shares: Sequence[int]
    """How many of them each of the two databases has."""

    def cost(self, databases: int, role: str) -> float:
        """Processor seconds of a batch: the median."""
        own = [turn for turn in self.turns if turn.databases == databases]
        return float(median(getattr(turn, role) for turn in own))

    def tables(self) -> list[Table]:
        lines = []
        for databases in (1, 2):
            own = [turn for turn in self.turns if turn.databases == databases]
            lines.append(
                [
                    "one" if databases == 1 else "two",
                    f"{self.cost(databases, 'executors'):.2f}",
                    spread(turn.executors for turn in own),
                    f"{self.cost(databases, 'postgres'):.2f}",
                    spread(turn.postgres for turn in own),
                ]
            )
        shares = " and ".join(f"{share:,}" for share in self.shares)
        return [
            Table(
                "The parts of a batch in one database, and in two",
                f"{self.case.events:,} events, {self.case.name}. Two servers, half of the parts in"
                f" each: they have {shares} values of {len(_COMPARED)} metrics, none of them both,"
                " and together exactly those of the one. Processor seconds of a batch.",
                ["databases", "executors", "range", "PostgreSQL", "range"],
                lines,
            )
        ]

    def as_json(self) -> dict[str, Any]:
        costs = {
            str(databases): {role: self.cost(databases, role) for role in ("executors", "postgres")}
            for databases in (1, 2)
        }
        return {**asdict(self), "costs": costs}


def measure(session: Session, urls: Sequence[Sequence[str]], case: Case, batches: int) -> Sharded:
    """The same batches into one database and into two; ``urls`` are those of each."""
    segments = sorted(str(path) for path in (spool_of(case, batches) / SOURCE).iterdir())
    turns: list[ShardTurn] = []
    lanes = [Shards(session, own) for own in urls]
    try:
        for number in range(batches):
            paths = segments[number * SEGMENTS : (number + 1) * SEGMENTS]
            for lane in lanes:
                before = session.cpu()
                lane.run(number, paths, Path("/nonexistent"))
                cost = spent(before, session.cpu())
                turn = ShardTurn(len(lane.stores), cost[EXECUTORS], cost[POSTGRES])
                say(f"{turn}")
                if number:
                    turns.append(turn)
        whole, several = ([_values(store) for store in lane.stores] for lane in lanes)
    finally:
        for lane in lanes:
            lane.close()
    union: Counter[Any] = Counter()
    for own in several:
        union.update(own)
    if union != whole[0] or not union:
        raise RuntimeError("two databases have not the values of one")
    return Sharded(case, turns, union.total(), [own.total() for own in several])


def _values(store: Store) -> Counter[Any]:
    """All values; one that two databases have would be there twice."""
    return Counter(
        (metric, grain, value.bucket, value.entity_id, str(value.value))
        for metric in _COMPARED
        for grain in Grain
        for value in store.values(metric, grain=grain)
    )
