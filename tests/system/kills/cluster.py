"""A pipeline on a cluster, into PostgreSQL, of which everything is killed at random moments.

``python -m tests.system.kills.cluster --kills 100 --seed 1`` makes so many kills, in rounds with a
store of their own. After each the store is compared with the oracle, the outbox with the store, and
files with those that commits name. The same seed makes the same choices, though not in the same
milliseconds. :func:`main` says what came of it, and ends with an error at the first difference.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg

from batchmill.outbox import Outbox
from batchmill.store import open_store
from tests.kit.exporters import listed_changes
from tests.kit.jvm import jvm_options
from tests.kit.pipelines import (
    MIXED_OAL,
    differences,
    expected_whole,
    mixed_spool,
    whole,
    write_segment,
)
from tests.kit.processes import Life
from tests.kit.servers.postgres import Postgres, make_postgres
from tests.kit.threads import PATIENCE_S
from tests.system.cluster import spark_cluster
from tests.system.cluster.spark_cluster import WORKERS, Cluster
from tests.system.kills.driver import say, start_driver

CONF = {
    **spark_cluster.CONF,
    "spark.executor.extraJavaOptions": jvm_options(),
    # What an executor had shuffled is gone with it, as on a machine of its own, and missed soon.
    "spark.shuffle.readHostLocalDisk": "false",
    "spark.shuffle.io.maxRetries": "2",
    "spark.shuffle.io.retryWait": "200ms",
}
KINDS = {
    "driver": 4,
    "executor": 5,
    "Python worker": 3,
    "connection": 3,
    "database process": 2,
    "database server": 2,
    "cluster": 1,
}
"""What is killed, and how often in twenty kills."""
A_ROUND = 20
TASK_BYTES = 4_000
"""Bytes of segments a task: a batch has more tasks than there are cores."""
PARTS = 16
LIVES_IN_VAIN = 3
"""So many drivers in a row that end with an error, though nothing was killed, are too many."""
SLOW = """
CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN PERFORM pg_sleep(0.15 * random() ^ 2); RETURN NULL; END $$;
CREATE TRIGGER slow AFTER INSERT OR DELETE ON part_commit
    FOR EACH STATEMENT EXECUTE FUNCTION slow();
"""
"""Commits take as long as those of real batches, which are larger."""
_ERROR = re.compile(r"(?:Caused by: )?(?:\w+\.)*\w*(?:Error|Exception)\b.*")


@dataclass(frozen=True)
class Kill:
    """What is to be killed, and when: so long after ``after``."""

    kind: str
    after: str
    """``now``; a batch is ``opened``; some of its ``parts`` are committed; its ``books`` begin."""
    delay_s: float

    def __str__(self) -> str:
        return f"{self.kind}, {self.delay_s * 1000:.0f} ms after {self.after}"


def kills(rng: random.Random, count: int) -> list[Kill]:
    """Of all kinds, in random order; the last is that of a driver, whose successor lives on.

    So many kills as there are kinds are one of each.
    """
    turns = range(max(KINDS.values()))
    kinds = [kind for turn in turns for kind, times in KINDS.items() if times > turn]
    several = [kinds[at % len(kinds)] for at in range(count)]
    rng.shuffle(several)
    several.remove("driver")
    longest = {"now": 2.0, "opened": 1.0, "parts": 0.15, "books": 0.05}
    moments = rng.choices(list(longest), (1, 3, 5, 2), k=count)
    return [
        Kill(kind, after, rng.uniform(0, longest[after]))
        for kind, after in zip([*several, "driver"], moments, strict=True)
    ]


@dataclass
class KillStats:
    """Counts over all kills."""

    killed: Counter[str] = field(default_factory=Counter)
    half: Counter[str] = field(default_factory=Counter)
    """Those while some parts of a batch were committed and others not, by kind."""
    lives: int = 0
    resumed: int = 0
    """Lives of drivers whose first batch had parts that were committed before."""
    gave_up: Counter[str] = field(default_factory=Counter)
    """Errors that drivers ended with."""
    rerun: int = 0
    """Stages that Spark ran again."""
    batches: int = 0

    def report(self) -> str:
        """A table, and the rest."""
        lines = [f"{'killed':<18}{'times':>6}{'while a batch was half committed':>35}"]
        for kind in KINDS:
            lines.append(f"{kind:<18}{self.killed[kind]:>6}{self.half[kind]:>35}")
        lines.append(f"{'all':<18}{self.killed.total():>6}{self.half.total():>35}")
        lines.append(
            f"{self.lives} drivers, {self.resumed} of which found parts committed before; "
            f"{self.gave_up.total()} ended with an error; {self.batches} batches; "
            f"{self.rerun} stages run again"
        )
        lines += [f"  {times} x {error}" for error, times in self.gave_up.most_common()]
        return "\n".join(lines)


class ClusterRun:
    """One pipeline through as many lives of everything as it takes, until its spool is empty."""

    def __init__(
        self, folder: Path, cluster: Cluster, server: Postgres, rng: random.Random, stats: KillStats
    ) -> None:
        self._folder = folder
        self._cluster = cluster
        self._server = server
        self._rng = rng
        self._stats = stats
        self._url = server.new_database()
        self._born = 0
        self._heard = 0
        self._found: int | None = None
        self._in_vain = 0
        self._undisturbed = True
        """Whether nothing was killed during the life of the last driver."""
        self._heir: Life | None = None
        self._watch: psycopg.Connection[Any] | None = None
        self.events: Mapping[str, Any] = {}
        self.again: Sequence[Any] = ()

    def fill(self, typed: int, spans: int) -> None:
        """Fill the spool: events, deltas, spans, of which some come twice."""
        spool = self._folder / "spool"
        self.events = mixed_spool(spool, self._rng, typed=typed, spans=spans, deltas=-(-typed // 4))
        self.again = self._rng.sample(self.events["Span"], 40)
        segments = list(spool.rglob("*.parquet"))
        for name in range(2):
            path = write_segment(spool, "Span", self.again[name::2], f"again-{name}")
            moment = self._rng.choice(segments).stat().st_mtime
            os.utime(path, (moment, moment))

    def run(self, several: Sequence[Kill]) -> int:
        """Make the kills, as long as there is something to do; how many that were."""
        with open_store(self._url):  # the tables are there then
            self._server.execute(SLOW, self._url.rpartition("/")[2])
        done = 0
        life = self._next()
        try:
            while True:
                kill = several[done] if done < len(several) else None
                if self._is_time(life, kill):
                    assert kill is not None
                    if self._strike(life, kill):
                        self._undisturbed = not life.running
                        done += 1
                        self._in_vain = 0
                elif "done" in life.lines:
                    life.end()
                    return done
                if not life.running:
                    self._bury(life)
                    life = self._next()
        finally:
            life.kill()
            if self._heir is not None:
                self._heir.kill()
            if self._watch is not None:
                self._watch.close()

    def check(self) -> None:
        """Compare everything with what it must be."""
        wanted = expected_whole(MIXED_OAL, self.events)
        wanted["counter", "duplicates", "Span", "same trace and span id"] = len(self.again)
        assert differences(whole(self._url), wanted) == []
        checkpoint = self._folder / "checkpoint"
        outbox = Outbox.of(checkpoint)
        with open_store(self._url) as store:
            for metric in ("ep_count", "ep_cpm"):
                values = {
                    (value.bucket, value.entity_id): value.value for value in store.values(metric)
                }
                added = listed_changes(store, checkpoint, metric)
                assert differences(added, values) == [], f"the outbox, {metric}"
            listed = {file.path for file in store.outbox(outbox.place, limit=1_000_000)}
        files = outbox.folder.glob("*/*.arrow")
        assert self._left_over({f"{path.parent.name}/{path.name}" for path in files}, listed) == []
        with psycopg.connect(self._url) as database:
            assert database.execute("SELECT * FROM part_commit").fetchall() == []
            named = {_name(path) for (path,) in database.execute("SELECT path FROM carry")}
        state = (checkpoint / "state").glob("*/*")
        assert self._left_over({_name(str(path)) for path in state}, named) == []
        assert list((self._folder / "spool").rglob("*.parquet")) == []

    def _left_over(self, files: set[str], named: set[str]) -> list[str]:
        """Files that should not be there. Those of tasks that died stay until the next claim."""
        assert named <= files, f"missing: {sorted(named - files)}"
        return sorted(files - named) if self._undisturbed else []

    def _next(self) -> Life:
        """The next driver, which may have started its Spark already."""
        life = self._start() if self._heir is None else self._heir
        life.tell("go")
        self._stats.lives += 1
        self._heard, self._found, self._heir = 0, None, None
        return life

    def _start(self) -> Life:
        self._born += 1
        return start_driver(
            self._folder,
            self._url,
            self._born,
            master=self._cluster.url,
            conf=CONF,
            batch_files=self._rng.choice((1, 1, 2)),
            task_bytes=TASK_BYTES,
            dedup_s=600,
            remove_read=True,
            outbox=True,
        )

    def _bury(self, life: Life) -> None:
        """Note what a driver did that is dead."""
        by_itself = not life.over
        life.kill()
        if by_itself:
            errors = [line for line in life.report(1000).splitlines() if _ERROR.match(line)]
            self._stats.gave_up[errors[-1][:160] if errors else "no error"] += 1
            say(f"a driver gave up:\n{life.report()}")
            self._in_vain += 1
            assert self._in_vain < LIVES_IN_VAIN, life.report()
        self._hear(life)

    def _hear(self, life: Life) -> list[str]:
        """What a driver has said since the last call."""
        fresh = life.lines[self._heard :]
        self._heard += len(fresh)
        for line in fresh:
            if match := re.fullmatch(r"batch \d+ opened, (\d+)", line):
                resumed, self._found = self._found is None, int(match[1])
                self._stats.resumed += resumed and self._found > 0
            elif match := re.fullmatch(r"batch \S+ rerun (\d+)", line):
                self._stats.rerun += int(match[1])
            self._stats.batches += re.fullmatch(r"commit \d+ end", line) is not None
            # A driver claims again after a commit that failed.
            if line.startswith("claim") and life.running and self._heir is None:
                # The cluster's cores are those of the driver that was there first.
                self._heir = self._start()
        return fresh

    def _is_time(self, life: Life, kill: Kill | None) -> bool:
        """Wait for the moment of a kill; False if the driver ends before."""
        after = kill.after if kill else "never"
        said = {"opened": r"batch \d+ opened, \d+", "books": r"commit \d+ begin"}.get(after)
        deadline = time.monotonic() + 2 * PATIENCE_S
        while True:
            alive = life.listen(0.003)
            fresh = self._hear(life)
            if not alive:
                return False
            if fresh:
                deadline = time.monotonic() + 2 * PATIENCE_S
            assert time.monotonic() < deadline, f"{kill}: it hangs:\n{life.report()}"
            if (
                after == "now"
                or (said is not None and any(re.fullmatch(said, line) for line in fresh))
                or (after == "parts" and self._half_committed())
            ):
                assert kill is not None
                life.listen(kill.delay_s)
                return life.running

    def _half_committed(self) -> bool:
        """Whether this driver's tasks have committed some parts of a batch and not all."""
        return self._found is not None and self._found < self._recorded() < PARTS

    def _recorded(self) -> int:
        """How many parts of the current batch are committed; 0 if nobody knows."""
        try:
            rows = self._database().execute("SELECT count(*) FROM part_commit").fetchall()
            return int(rows[0][0])
        except psycopg.Error:
            return 0

    def _database(self) -> psycopg.Connection[Any]:
        if self._watch is None or self._watch.closed:
            self._watch = psycopg.connect(self._url, autocommit=True)
        return self._watch

    def _strike(self, life: Life, kill: Kill) -> bool:
        """Kill it; False if there is nothing to be killed."""
        half, recorded = self._half_committed(), self._recorded()
        last = life.lines[-1] if life.lines else "nothing"
        strike: dict[str, Callable[[Life], bool]] = {
            "driver": self._kill_driver,
            "executor": self._kill_executor,
            "Python worker": self._kill_python,
            "connection": self._end_connection,
            "database process": self._kill_backend,
            "database server": self._crash_server,
            "cluster": self._kill_cluster,
        }
        if not strike[kill.kind](life):
            return False
        self._stats.killed[kill.kind] += 1
        self._stats.half[kill.kind] += half
        moment = time.strftime("%H:%M:%S")
        number = self._stats.killed.total()
        say(f"{moment} {number}: {kill}; at {last!r}, {recorded} parts committed")
        return True

    def _kill_driver(self, life: Life) -> bool:
        life.kill()
        return True

    def _kill_executor(self, life: Life) -> bool:
        pids = [pid for number in range(WORKERS) for pid in self._cluster.executors(number)]
        return self._kill_one(pids)

    def _kill_python(self, life: Life) -> bool:
        return self._kill_one(self._cluster.python_workers())

    def _kill_backend(self, life: Life) -> bool:
        """The server ends all its other processes then, and recovers."""
        return self._kill_one(self._connections())

    def _kill_one(self, pids: Sequence[int]) -> bool:
        try:
            os.kill(self._rng.choice(pids), signal.SIGKILL)
        except (IndexError, ProcessLookupError):
            return False
        return True

    def _connections(self) -> list[int]:
        """The server's processes for others: those inside a transaction, if there are any."""
        try:
            rows = self._database().execute(
                "SELECT pid, state FROM pg_stat_activity WHERE pid <> pg_backend_pid() "
                "AND datname = current_database() AND backend_type = 'client backend'"
            )
            states = dict(rows.fetchall())
        except psycopg.Error:
            return []
        return sorted(pid for pid in states if states[pid] != "idle") or sorted(states)

    def _end_connection(self, life: Life) -> bool:
        if not (pids := self._connections()):
            return False
        with contextlib.suppress(psycopg.Error):
            self._database().execute("SELECT pg_terminate_backend(%s)", (self._rng.choice(pids),))
        return True

    def _crash_server(self, life: Life) -> bool:
        self._server.stop("immediate")
        life.listen(self._rng.uniform(0, 2))
        self._server.start()
        return True

    def _kill_cluster(self, life: Life) -> bool:
        """All of it; a master without recovery forgets its drivers, so theirs is started again."""
        self._cluster.stop()
        life.listen(self._rng.uniform(0, 2))
        life.kill()
        if self._heir is not None:
            self._heir.kill()
            self._heir = None
        self._cluster.start()
        return True


def _name(path: str) -> str:
    return "/".join(path.rstrip("/").rsplit("/", 2)[-2:])


def kill_all(
    folder: Path, cluster: Cluster, server: Postgres, seed: int, count: int, stats: KillStats
) -> None:
    """One round: so many kills at most, then everything is compared."""
    rng = random.Random(seed)
    folder.mkdir()
    run = ClusterRun(folder, cluster, server, rng, stats)
    run.fill(typed=max(2, count // 4), spans=max(3, count // 3))
    try:
        made = run.run(kills(rng, count))
        run.check()
    except AssertionError as error:
        raise AssertionError(f"seed {seed}, {count} kills, files in {folder}: {error}") from error
    say(f"seed {seed}: {made} kills, all is equal")


@contextlib.contextmanager
def surroundings(folder: Path) -> Iterator[tuple[Cluster, Postgres]]:
    """A cluster and a server of their own."""
    server = make_postgres()
    assert server is not None, "PostgreSQL is not here"
    try:
        with Cluster(folder) as cluster:
            yield cluster, server
    finally:
        server.drop_all()


def main(arguments: Sequence[str]) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, prog="python -m tests.system.kills.cluster"
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1, help="that of the first round")
    given = parser.parse_args(arguments)
    stats, seed = KillStats(), given.seed
    began = time.monotonic()
    # Nothing is left behind then.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    folder = Path(tempfile.mkdtemp(prefix="batchmill-kills-"))
    with surroundings(folder) as (cluster, server):
        while stats.killed.total() < given.kills:
            kill_all(folder / str(seed), cluster, server, seed, A_ROUND, stats)
            say(f"seeds {given.seed} to {seed}, {time.monotonic() - began:.0f} s")
            say(stats.report())
            seed += 1


if __name__ == "__main__":
    main(sys.argv[1:])
