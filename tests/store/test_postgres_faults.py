"""Commits of whole batches into PostgreSQL when something breaks: nothing is lost or doubled."""

from __future__ import annotations

import random
import time

import pytest

from batchmill.store import StoreUnavailableError
from batchmill.store.postgres import session
from tests.kit.processes import Life
from tests.kit.servers.postgres import Postgres
from tests.kit.stores import (
    HASTY,
    Writer,
    all_states,
    before,
    expected_states,
    metrics,
    open_postgres,
    some_rows,
)

LIVES = """
import batchmill.store.postgres.session as session
from tests.kit.stores import Writer, before, open_postgres, some_rows

def here(place):
    def act(calls):
        if moment == place and calls == int(nth):
            print("here", flush=True)
            sys.stdin.readline()  # until it is killed
    return act

session.copy_rows = before(session.copy_rows, here("before a copy"))
session.merge_table = before(session.merge_table, here("before a merge"))
committed = int(last) if last else None
store = open_postgres(url)
writer = Writer(store, committed=committed)
# A commit of the process that was killed may have ended since the test has looked.
writer.number = 0 if writer.claim.last_batch is None else writer.claim.last_batch + 1
if moment == "any time":
    print("here", flush=True)
while writer.number < int(batches):
    writer.write(*some_rows(writer.number))
store.close()
print("done", flush=True)
"""
BATCHES = 12


@pytest.mark.system
def test_a_writing_process_that_is_killed_loses_and_doubles_nothing(postgres_url: str) -> None:
    """Killed before a copy, between copy and merge, and at any time."""
    rng = random.Random(6)
    places = ["before a copy"] * 2 + ["before a merge"] * 2
    moments = [(place, rng.randrange(1, 6)) for place in places]
    rng.shuffle(moments)
    with open_postgres(postgres_url) as store:
        for moment, nth in [*moments, *[("any time", 0)] * 2, ("never", 0)]:
            last = [
                stream.last_batch for stream in store.streams() if stream.last_batch is not None
            ]
            with Life.of_script(
                LIVES,
                url=postgres_url,
                moment=moment,
                nth=str(nth),
                last=str(last[0]) if last else "",
                batches=str(BATCHES),
            ) as process:
                process.must_hear("done" if moment == "never" else "here")
                if moment == "any time":
                    time.sleep(rng.uniform(0, 0.2))  # the moment itself is what is random
        rows = [row for number in range(BATCHES) for row in some_rows(number)]
        assert all_states(store) == expected_states(metrics(), rows)


@pytest.mark.parametrize("mode", ["immediate", "fast"])
@pytest.mark.parametrize("name", ["copy_rows", "merge_table"])
def test_a_server_restarted_inside_a_commit(
    postgres: Postgres,
    postgres_url: str,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    mode: str,
) -> None:
    """In the middle of a copy, or of a merge: the commit is tried again, and gets in once."""
    with open_postgres(postgres_url) as store:
        writer = Writer(store)
        writer.write(*some_rows(0))
        restarts: list[str] = []

        def restart(calls: int) -> None:
            if calls == 2 and not restarts:
                restarts.append(mode)
                postgres.stop(mode)
                postgres.start()

        monkeypatch.setattr(session, name, before(getattr(session, name), restart))
        writer.write(*some_rows(1), counters={("read", "Endpoint", ""): 1})
        assert restarts == [mode]
        rows = some_rows(0) + some_rows(1)
        assert all_states(store) == expected_states(writer.metrics, rows)
        assert store.counters() == {("read", "Endpoint", ""): 1}


def test_a_server_that_stays_away_ends_a_commit_with_what_to_do(
    postgres: Postgres, postgres_url: str
) -> None:
    """The same batch gets in when the server is back."""
    with open_postgres(postgres_url, retry=HASTY) as store:
        writer = Writer(store)
        writer.write(*some_rows(0))
        batch = writer.batch(some_rows(1))
        postgres.stop("immediate")
        with pytest.raises(StoreUnavailableError, match="Check that the database runs"):
            store.commit(batch)
        postgres.start()
        assert store.commit(batch).applied
        rows = some_rows(0) + some_rows(1)
        assert all_states(store) == expected_states(writer.metrics, rows)
