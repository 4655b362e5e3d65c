"""Parts in a real PostgreSQL when something breaks, or others write at the same time."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from batchmill.oal import load
from batchmill.store import (
    Deltas,
    EntityRow,
    FencedError,
    LayoutChangedError,
    PartsMissingError,
    StaleTaskError,
    TopNRow,
    open_for_task,
)
from batchmill.store.postgres import PostgresStore
from batchmill.store.postgres import session as session_module
from batchmill.store.postgres.connection import copy_rows
from batchmill.store.postgres.session import PostgresSession
from batchmill.store.retry import TransientError
from tests.kit.servers.postgres import Postgres
from tests.kit.stores import (
    MINUTE,
    Backend,
    Measurement,
    all_states,
    before,
    expected_states,
    some_rows,
)
from tests.kit.threads import WAIT_S, Gate, spawn, until
from tests.store.parts.kit import DAY, PARTS, Parted, as_arrow, part_of

RECORD = "INSERT INTO part_commit"
LAST = "UPDATE part_commit"
"""The last statement of a task's transaction."""


@pytest.fixture
def backend(postgres_url: str) -> Iterator[Backend]:
    """A place for one store."""
    made = Backend(postgres_url)
    yield made
    made.close()


def opened(backend: Backend, **settings: Any) -> PostgresStore:
    """One more connection to the store, as another process has it."""
    store = backend.open(**settings)
    assert isinstance(store, PostgresStore)
    return store


def hold(monkeypatch: pytest.MonkeyPatch, statement: str) -> Gate:
    """Hold the first transaction that comes to a statement, before it runs it."""
    gate = Gate()
    run = PostgresSession.run
    held: list[str] = []

    def held_run(self: PostgresSession, sql: str, params: Any = ()) -> int:
        if sql.startswith(statement) and not held:
            held.append(sql)
            gate.wait()
        return run(self, sql, params)

    monkeypatch.setattr(PostgresSession, "run", held_run)
    return gate


def waits(store: PostgresStore) -> bool:
    """Whether a transaction in this database waits for another one."""
    rows = store._read(
        lambda session: session.rows(
            "SELECT 1 FROM pg_stat_activity "
            "WHERE datname = current_database() AND wait_event_type = 'Lock'"
        )
    )
    return bool(rows)


def finish(parted: Parted, rows: list[Measurement]) -> None:
    """Commit what is left of a batch, and check the store."""
    again = parted.begin()
    left = set(range(PARTS)) - again.recorded
    if left:
        assert parted.store.commit_parts(*parted.task(rows, again, *left)).applied
    assert parted.store.commit(parted.books(rows)).applied
    parted.writer.number += 1
    assert all_states(parted.store) == expected_states(parted.writer.metrics, rows)


@pytest.mark.parametrize("first_ends", ["committed", "killed"])
def test_of_two_attempts_at_once_one_is_applied(
    backend: Backend, postgres: Postgres, monkeypatch: pytest.MonkeyPatch, first_ends: str
) -> None:
    """The second waits for the first, and does its work only if that one is gone."""
    parted = Parted(opened(backend))
    one, two = opened(backend), opened(backend)
    rows = some_rows(0)
    task = parted.task(rows, parted.begin(), 0, 1)
    with hold(monkeypatch, LAST) as gate:
        first = spawn(one.commit_parts, *task)
        gate.wait_entered()
        second = spawn(two.commit_parts, *task)
        until(lambda: waits(one), "the second attempt waits")
        assert not second.done()
        if first_ends == "killed":
            pid = one._open["writer"].info.backend_pid
            postgres.execute(f"SELECT pg_terminate_backend({pid})")
            assert second.result(WAIT_S).applied
    results = [first.result(WAIT_S).applied, second.result(WAIT_S).applied]
    assert results == [first_ends == "committed", first_ends == "killed"]
    finish(parted, rows)


def test_a_claim_waits_for_a_part_and_sees_it(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in flight is committed and counted; what comes later is fenced off."""
    old = Parted(opened(backend))
    rows = some_rows(0)
    run = old.begin()
    task = opened(backend)
    with hold(monkeypatch, LAST) as gate:
        part = spawn(task.commit_parts, *old.task(rows, run, 0))
        gate.wait_entered()
        old.store.release("live")
        other = opened(backend)
        claim = spawn(other.claim, "live", "checkpoint-1", fresh=True, committed=None)
        until(lambda: waits(task), "the claim waits")
        assert not claim.done()
    assert part.result(WAIT_S).applied
    assert claim.result(WAIT_S).epoch == old.writer.claim.epoch + 1
    with pytest.raises(FencedError):
        task.commit_parts(*old.task(rows, run, 1))
    new = Parted(other)
    assert new.begin().recorded == {0}
    finish(new, rows)


def test_a_new_run_waits_for_a_part_of_the_one_before(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So nothing that it does not know of is committed after it has begun."""
    parted = Parted(opened(backend))
    rows = some_rows(0)
    run = parted.begin()
    task = opened(backend)
    with hold(monkeypatch, LAST) as gate:
        part = spawn(task.commit_parts, *parted.task(rows, run, 2))
        gate.wait_entered()
        may = spawn(parted.store.may_be_recut, "live", parted.writer.claim.epoch, 0)
        until(lambda: waits(task), "the new run waits")
    assert part.result(WAIT_S).applied
    assert not may.result(WAIT_S)
    with pytest.raises(StaleTaskError):
        task.commit_parts(*parted.task(rows, run, 3))
    finish(parted, rows)


def test_a_late_attempt_beside_the_books_is_applied_once(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes while the books forget the parts: it waits, and sees that the batch is over."""
    parted = Parted(opened(backend))
    late = opened(backend)
    rows = some_rows(0)
    run = parted.begin()
    tasks = [parted.task(rows, run, *parts) for parts in ((0, 1), (2, 3))]
    for task in tasks:
        parted.store.commit_parts(*task)
    with hold(monkeypatch, "UPDATE stream SET token") as gate:
        books = spawn(parted.store.commit, parted.books(rows))
        gate.wait_entered()
        attempt = spawn(late.commit_parts, *tasks[0])
        until(lambda: waits(late), "the attempt waits")
    assert books.result(WAIT_S).applied
    assert not attempt.result(WAIT_S).applied
    assert all_states(parted.store) == expected_states(parted.writer.metrics, rows)


def test_a_backend_that_is_killed_at_each_statement(
    backend: Backend, postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task tries again, and its parts are in the store once."""
    parted = Parted(opened(backend))
    task = opened(backend)
    steps: list[int] = []
    kill_at: list[int] = []

    def step(_: int) -> None:
        steps.append(len(steps))
        if kill_at and steps[-1] == kill_at[0]:
            kill_at.clear()
            pid = task._open["writer"].info.backend_pid
            postgres.execute(f"SELECT pg_terminate_backend({pid})")

    rows = some_rows(0)
    everything = list(rows)
    parted.write(rows)
    for name in ("rows", "run"):
        monkeypatch.setattr(PostgresSession, name, before(getattr(PostgresSession, name), step))
    monkeypatch.setattr(session_module, "copy_rows", before(copy_rows, step))
    killed, number = 0, 0
    while True:
        rows = some_rows(number + 1)
        run = parted.begin()
        steps.clear()
        kill_at[:] = [number]
        assert task.commit_parts(*parted.task(rows, run, 0, 1)).applied
        killed += not kill_at
        over = bool(kill_at)
        kill_at.clear()
        assert task.commit_parts(*parted.task(rows, run, 2, 3)).applied
        assert parted.store.commit(parted.books(rows)).applied
        parted.writer.number += 1
        everything += rows
        if over:
            break
        number += 1
    assert killed >= 15, "there are fewer statements than expected"
    assert all_states(parted.store) == expected_states(parted.writer.metrics, everything)


def test_an_answer_to_a_commit_that_is_lost(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next try finds the parts recorded."""
    parted = Parted(opened(backend))
    task = opened(backend)
    rows = some_rows(0)
    run = parted.begin()
    lost: list[bool] = []
    write = task._write_beside_once

    def write_and_lose(work: Callable[[Any], Any]) -> Any:
        result = write(work)
        if not lost:
            lost.append(True)
            raise TransientError("the connection broke")
        return result

    monkeypatch.setattr(task, "_write_beside_once", write_and_lose)
    task.commit_parts(*parted.task(rows, run, 0, 2))
    assert lost
    assert parted.begin().recorded == {0, 2}
    finish(parted, rows)


@pytest.mark.parametrize("mode", ["immediate", "fast"])
def test_a_server_restarted_between_parts(backend: Backend, postgres: Postgres, mode: str) -> None:
    """Parts that are committed stay, and the others follow over new connections."""
    parted = Parted(opened(backend))
    task = opened(backend)
    rows = some_rows(0)
    run = parted.begin()
    for part in range(PARTS):
        assert task.commit_parts(*parted.task(rows, run, part)).applied
        postgres.stop(mode)
        postgres.start()
    assert parted.begin().recorded == set(range(PARTS))
    finish(parted, rows)


def test_a_part_that_fails_leaves_the_others(backend: Backend) -> None:
    """Nothing of it is written, and it can be tried again by itself."""
    parted = Parted(opened(backend))
    rows = some_rows(0)
    run = parted.begin()
    parted.store.commit_parts(*parted.task(rows, run, 0))
    batch, share = parted.task(rows, run, 1, 2)
    wrong = dict.fromkeys(share.layout.owners, ("other", 1))
    with pytest.raises(LayoutChangedError):
        parted.store.commit_parts(batch, replace(share, layout=replace(share.layout, owners=wrong)))
    parted.store.commit_parts(*parted.task(rows, run, 3))
    with pytest.raises(PartsMissingError, match="parts 1, 2 are not"):
        parted.store.commit(parted.books(rows))
    assert parted.store.commit_parts(batch, share).applied
    finish(parted, rows)


def test_streams_with_the_same_entities_at_once(backend: Backend) -> None:
    """Each by several tasks: no error, and the sum of both."""
    batches = 6
    stores = [[opened(backend) for _ in range(2)] for _ in range(2)]
    streams = [
        Parted(tasks[0], stream=f"s{n}", checkpoint=f"c{n}", retire=False)
        for n, tasks in enumerate(stores)
    ]

    def rows_of(stream: int, number: int) -> list[Measurement]:
        rng = random.Random(100 * stream + number)
        return [
            Measurement(rng.randrange(1000), "x", MINUTE + number, f"e{rng.randrange(30)}")
            for _ in range(120)
        ]

    def write(stream: int) -> None:
        parted, tasks = streams[stream], stores[stream]
        for number in range(batches):
            rows = rows_of(stream, number)
            run = parted.begin()
            results = [
                spawn(store.commit_parts, *parted.task(rows, run, part, part + 2))
                for part, store in enumerate(tasks)
            ]
            assert all(result.result(WAIT_S).applied for result in results)
            assert parted.store.commit(parted.books(rows)).applied
            parted.writer.number += 1

    for done in [spawn(write, stream) for stream in range(2)]:
        done.result(WAIT_S)
    rows = [
        row for stream in range(2) for number in range(batches) for row in rows_of(stream, number)
    ]
    assert all_states(streams[0].store) == expected_states(streams[0].writer.metrics, rows)


@pytest.mark.parametrize("update_first", [1, session_module.UPDATE_FIRST])
def test_rows_that_seemed_new_are_merged(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, update_first: int
) -> None:
    """Another stream has some of the same rows in parts whose books are not closed yet."""
    monkeypatch.setattr(session_module, "UPDATE_FIRST", update_first)
    store = opened(backend)
    streams = [Parted(store, stream=name, checkpoint=name, retire=False) for name in ("one", "two")]
    first = [Measurement(1, entity=f"e{n}") for n in range(8)]
    streams[0].write(first)
    later = [
        [Measurement(n, minute=MINUTE + 1, entity=f"e{n}") for n in range(entities)]
        for entities in (4, 8)
    ]
    runs = [parted.begin() for parted in streams]
    for parted, run, rows in zip(streams, runs, later, strict=True):
        task = parted.task(rows, run, *range(PARTS))
        assert parted.store.commit_parts(*task).merged == 3 * len(rows)
    for parted, rows in zip(streams, later, strict=True):
        assert parted.store.commit(parted.books(rows)).applied
    rows = [*first, *later[0], *later[1]]
    assert all_states(store) == expected_states(streams[0].writer.metrics, rows)


@pytest.mark.parametrize("arrow", [False, True], ids=["lists", "arrow"])
def test_large_parts_update_first(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, arrow: bool
) -> None:
    """Rows that are there and rows that are not, in one table: each is merged once."""
    monkeypatch.setattr(session_module, "UPDATE_FIRST", 1)
    parted = Parted(opened(backend))
    rng = random.Random(3)
    everything: list[Measurement] = []
    for _ in range(6):
        rows = [
            Measurement(
                rng.randrange(1000),
                rng.choice(["GET", 'a"b\\c', "None", "tab\t, ü\n", ""]),
                MINUTE + rng.randrange(4),
                f"e{rng.randrange(40)}",
            )
            for _ in range(60)
        ]
        run = parted.begin()
        batch, share = parted.task(rows, run, *range(PARTS))
        if arrow:
            batch.deltas = [as_arrow(deltas) for deltas in batch.deltas]
        merged = parted.store.commit_parts(batch, share).merged
        assert merged == sum(len(deltas.buckets) for deltas in batch.deltas)
        parted.store.commit(parted.books(rows))
        parted.writer.number += 1
        everything += rows
    assert all_states(parted.store) == expected_states(parted.writer.metrics, everything)


def test_arrow_arrays_with_nulls_and_expired_days(backend: Backend) -> None:
    """A null adds nothing, and rows of a day that has expired are left out."""
    script = "calls = from(Endpoint.*).count(); slowest = from(Endpoint.latency).max();"
    parted = Parted(opened(backend, ttl_days=2), script=script)
    parted.write([Measurement(1)])
    rows = [Measurement(5, entity="e1"), Measurement(6, minute=MINUTE - 200 * DAY, entity="e1")]
    run = parted.begin()
    batch, share = parted.task(rows, run, *range(PARTS))
    batch.deltas = [as_arrow(deltas) for deltas in batch.deltas]
    column = parted.writer.layout.columns["slowest"][0]
    for deltas in batch.deltas:
        deltas.cells[column] = _nulls(deltas)
    assert parted.store.commit_parts(batch, share).merged == 3
    assert parted.store.commit(parted.books(rows)).applied
    assert [(value.entity_id, value.value) for value in parted.store.values("slowest")] == [
        ("id-one", 1)
    ]
    assert [(value.entity_id, value.value) for value in parted.store.values("calls")] == [
        ("id-e1", 1),
        ("id-one", 1),
    ]


def _nulls(deltas: Deltas) -> Any:
    import pyarrow as pa

    return pa.nulls(len(deltas.buckets), pa.int64())


def test_metrics_registered_meanwhile(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Registering waits for the part, and the parts after it find their columns."""
    parted = Parted(opened(backend))
    task = opened(backend)
    rows = some_rows(0)
    run = parted.begin()
    # Of another source: the tables that the part has in use are not what it waits for.
    more = load("more = from(Service.latency).sum();")
    with hold(monkeypatch, LAST) as gate:
        part = spawn(task.commit_parts, *parted.task(rows, run, 0, 1))
        gate.wait_entered()
        register = spawn(opened(backend).register, more, retire=False, stream="other")
        until(lambda: waits(task), "registering waits")
        assert not register.done()
    assert part.result(WAIT_S).applied
    register.result(WAIT_S)
    assert task.commit_parts(*parted.task(rows, run, 2, 3)).applied
    assert parted.store.commit(parted.books(rows)).applied
    states = all_states(parted.store)
    expected = expected_states(parted.writer.metrics, rows)
    assert {key: states[key] for key in expected} == expected


def test_slow_calls_of_two_streams_at_once(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both bring calls of one entity, and nothing else: no more than N are kept, the slowest."""
    stores = [opened(backend, top_n=3) for _ in range(2)]
    streams = [
        Parted(store, stream=f"s{n}", checkpoint=f"c{n}", retire=False)
        for n, store in enumerate(stores)
    ]
    rows = [Measurement(1, entity="e1")]
    tasks = []
    for parted in streams:
        parted.write(rows)
    for number, parted in enumerate(streams):
        batch, share = parted.task(rows, parted.begin(), part_of(rows[0]))
        batch.deltas = []
        batch.topn = [
            TopNRow("db", 0, MINUTE, 10 * latency + number, 0, "t", "s", "x", "x")
            for latency in range(5)
        ]
        tasks.append((batch, share))
    with hold(monkeypatch, LAST) as gate:
        first = spawn(stores[0].commit_parts, *tasks[0])
        gate.wait_entered()
        second = spawn(stores[1].commit_parts, *tasks[1])
        until(lambda: waits(stores[0]), "the second waits")
    assert first.result(WAIT_S).applied
    assert second.result(WAIT_S).applied
    assert [call.latency for call in stores[0].top("db")] == [41, 40, 31]


def test_an_entity_that_a_part_keeps_is_not_removed(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another stream's time makes it expire while a part sees it again: its layers stay, too."""
    settings = {"ttl_days": 2}
    parted = Parted(opened(backend, **settings))
    other = Parted(opened(backend, **settings), stream="other", checkpoint="c2", retire=False)
    parted.write([Measurement(1, entity="e1")])
    later = MINUTE + 2 * DAY
    rows = [Measurement(2, minute=later, entity="e1")]
    task = opened(backend, **settings)
    run = parted.begin()
    part = part_of(rows[0])
    with hold(monkeypatch, LAST) as gate:
        first = spawn(task.commit_parts, *parted.task(rows, run, part))
        gate.wait_entered()
        removing = spawn(other.write, [Measurement(3, minute=later + DAY, entity="new")])
        until(lambda: waits(task), "the removal waits")
    assert first.result(WAIT_S).applied
    removing.result(WAIT_S)
    parted.store.commit_parts(
        *parted.task(rows, run, *(number for number in range(PARTS) if number != part))
    )
    assert parted.store.commit(parted.books(rows)).applied
    (kept,) = [entity for entity in parted.store.entities() if entity.id == "id-e1"]
    assert kept.layers == {"GENERAL"}
    assert [value.value for value in parted.store.values("calls", entity="id-e1")] == [1]


def test_an_entity_that_is_known_is_not_written_again(backend: Backend) -> None:
    """By another process, whose cache is empty: its row stays as it is."""
    parted = Parted(opened(backend))
    parted.write([Measurement(1, entity=f"e{n}") for n in range(8)])
    where = "SELECT id, ctid::text, key FROM entity ORDER BY id"
    before_it = parted.store._read(lambda session: session.rows(where))
    task = opened(backend)
    rows = [Measurement(2, entity=f"e{n}") for n in range(10)]
    run = parted.begin()
    batch, share = parted.task(rows, run, *range(PARTS))
    changed = batch.entities[0]
    batch.entities[0] = EntityRow(changed.kind, changed.id, "zz new", frozenset(["MESH"]))
    task.commit_parts(batch, share)
    after = parted.store._read(lambda session: session.rows(where))
    assert len(after) == 10
    assert set(before_it) - set(after) == {row for row in before_it if row[0] == changed.id}
    parted.store.commit(parted.books(rows))
    (renamed,) = [entity for entity in parted.store.entities() if entity.id == changed.id]
    assert renamed.name == "zz new"
    assert renamed.layers == {"GENERAL", "MESH"}
    calls = {value.entity_id: value.value for value in parted.store.values("calls")}
    assert calls[changed.id] == 2


@pytest.mark.parametrize("by", ["environment", "file"])
def test_a_task_gets_the_password_that_the_driver_has_found(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, tmp_path: Any, by: str
) -> None:
    """On its machine there is neither the variable nor the file."""
    if by == "environment":
        monkeypatch.setenv("PGPASSWORD", "s3cret")
    else:
        file = tmp_path / "passwords"
        file.write_text("*:*:*:*:s3cret\n")
        file.chmod(0o600)
        monkeypatch.setenv("PGPASSFILE", str(file))
    address = opened(backend).task_address()
    monkeypatch.undo()
    parameters = dict(address.parameters)
    assert parameters["password"] == "s3cret"
    assert "passfile" not in parameters
    assert "s3cret" not in repr(address)
    with address.open() as store:
        assert isinstance(store, PostgresStore)
        assert store.newest_minute() is None
        assert store._open["reader"].info.password == "s3cret"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork()")
def test_a_forked_process_opens_a_store_of_its_own(backend: Backend) -> None:
    """Spark's worker processes are forked."""
    address = opened(backend).task_address()
    store = open_for_task(address)
    assert store.newest_minute() is None
    pid = os.fork()
    if pid == 0:
        os._exit(0 if open_for_task(address) is not store else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert open_for_task(address) is store
    assert store.newest_minute() is None
    store.close()


def test_what_is_recorded_can_be_read(backend: Backend) -> None:
    """The figures of a task are with its first part."""
    parted = Parted(opened(backend))
    rows = some_rows(0)
    run = parted.begin()
    parted.store.commit_parts(*parted.task(rows, run, 3, 1))
    recorded = parted.store._read(
        lambda session: session.rows("SELECT part, n_rows FROM part_commit ORDER BY part")
    )
    own = sum(part_of(row) in (1, 3) for row in rows)
    assert [(part, json.loads(counts)) for part, counts in recorded] == [
        (1, {"Endpoint": own}),
        (3, {}),
    ]
