"""Commits: exactly once, in order, by one writer."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import pytest

from batchmill.sources import Grain, UnknownNameError
from batchmill.store import (
    Batch,
    BatchGapError,
    CheckpointMismatchError,
    Deltas,
    EntityRow,
    FencedError,
    LayoutChangedError,
    MetricConflictError,
    StaleStateError,
    StoreClosedError,
    StoreInUseError,
    StreamFile,
)
from batchmill.store.sql.session import Session
from tests.kit.processes import Life
from tests.kit.stores import (
    MINUTE,
    Backend,
    Measurement,
    Writer,
    all_states,
    entity_row,
    expected_states,
    metrics,
)
from tests.kit.threads import WAIT_S

HOLD = """
from batchmill.store import open_store
store = open_store(url)
store.claim("live", "checkpoint-1", fresh=True, committed=None)
print("claimed", flush=True)
sys.stdin.readline()
"""
WRITE = """
from batchmill.store import open_store
from tests.kit.stores import Measurement, Writer
writer = Writer(open_store(url), stream="backfill", checkpoint="checkpoint-2", retire=False)
print("ready", flush=True)
sys.stdin.readline()
for number in range(20):
    writer.write(Measurement(number, entity="both"), Measurement(1, entity="there"))
print("done", flush=True)
"""


def test_a_committed_batch_is_read_back(backend: Backend) -> None:
    """What went in comes out: in all three grains, with the entity's name and layers."""
    store = backend.open()
    Writer(store).write(Measurement(30), Measurement(50), Measurement(90, minute=MINUTE + 1))
    (first, second) = store.values("avg")
    assert (first.bucket, first.value, second.value) == (MINUTE, 40, 90)
    assert (first.entity_id, first.entity_name) == ("id-one", "one")
    assert first.layers == {"GENERAL"}
    assert [value.value for value in store.values("avg", grain=Grain.DAY)] == [56]
    assert store.newest_minute() == MINUTE + 1


def test_a_replayed_batch_changes_nothing(backend: Backend) -> None:
    """A batch that is in already is known by its number, and not applied again."""
    store = backend.open()
    writer = Writer(store)
    old = writer.write(Measurement(30), counters={("read", "Endpoint", ""): 1})
    last = writer.write(Measurement(40), counters={("read", "Endpoint", ""): 1})
    before = all_states(store), store.counters()
    assert not store.commit(last).applied
    assert not store.commit(old).applied
    assert (all_states(store), store.counters()) == before
    assert store.counters() == {("read", "Endpoint", ""): 2}


@pytest.mark.parametrize("number", [1, 7])
def test_a_gap_is_refused(backend: Backend, number: int) -> None:
    """A batch whose forerunner is missing is an error, also as the first of all."""
    store = backend.open()
    writer = Writer(store)
    with pytest.raises(BatchGapError, match="expects batch 0") as caught:
        store.commit(writer.batch([Measurement(30)], number=number))
    assert (caught.value.number, caught.value.expected) == (number, 0)
    assert all_states(store) == {}


def test_a_failed_commit_leaves_nothing_behind(backend: Backend) -> None:
    """A batch goes in as a whole or not at all, its entities too, and can be put right."""
    store = backend.open()
    writer = Writer(store)
    bad = writer.batch([Measurement(30)], counters={("a", "b", "c"): 1})
    bad.deltas.append(Deltas("Endpoint", Grain.DAY, [20240301], [0], {"c999": [1]}))
    with pytest.raises(UnknownNameError, match="c999"):
        store.commit(bad)
    assert (store.entities(), store.counters(), all_states(store)) == ([], {}, {})
    writer.write(Measurement(30))
    assert all_states(store) == expected_states(writer.metrics, [Measurement(30)])


def test_an_older_writer_is_fenced_off(backend: Backend) -> None:
    """Once a stream is claimed again, the former writer's commits are refused."""
    store = backend.open()
    writer = Writer(store)
    writer.write(Measurement(30))
    claim = store.claim("live", "checkpoint-1", fresh=False, committed=0)
    with pytest.raises(FencedError, match="stop it") as caught:
        store.commit(writer.batch([Measurement(40)]))
    assert (caught.value.epoch, caught.value.current) == (writer.claim.epoch, claim.epoch)
    writer.claim = claim
    writer.write(Measurement(40))


def test_a_stream_must_be_claimed(backend: Backend) -> None:
    """Nobody commits to a stream that nobody claimed."""
    with pytest.raises(FencedError, match="call claim"):
        backend.open().commit(Batch("live", 1, 0))


def test_a_second_writer_is_refused_until_the_first_is_killed(backend: Backend) -> None:
    """The lock is another process's while it lives, and free the moment it is killed."""
    store = backend.open()
    with Life.of_script(HOLD, url=backend.url) as other:
        other.must_hear("claimed")
        with pytest.raises(StoreInUseError, match=f"pid {other.pid}") as caught:
            store.claim("live", "checkpoint-1", fresh=False, committed=None)
        assert caught.value.holder["pid"] == other.pid
        store.claim("another", "checkpoint-9", fresh=True, committed=None)
    assert store.claim("live", "checkpoint-1", fresh=False, committed=None).epoch == 2


def test_a_released_stream_can_be_claimed_by_another_store(backend: Backend) -> None:
    """release() and close() hand a stream over; before that a second store is refused."""
    one, two = backend.open(), backend.open()
    one.claim("live", "c", fresh=True, committed=None)
    with pytest.raises(StoreInUseError):
        two.claim("live", "c", fresh=False, committed=None)
    one.release("live")
    two.claim("live", "c", fresh=False, committed=None)
    two.close()
    assert one.claim("live", "c", fresh=False, committed=None).epoch == 3


@pytest.mark.parametrize(
    ("checkpoint", "fresh", "committed", "reason"),
    [
        ("other", True, None, "other"),
        ("other", False, 1, "other"),
        ("checkpoint-1", False, 2, "behind"),
        ("checkpoint-1", False, None, "ahead"),
    ],
)
def test_a_checkpoint_that_does_not_match_is_refused(
    backend: Backend, checkpoint: str, fresh: bool, committed: int | None, reason: str
) -> None:
    """Each way in which store and checkpoint can part is told, and the stream stays free."""
    store = backend.open()
    writer = Writer(store)
    writer.write(Measurement(30))
    writer.write(Measurement(40))
    store.release("live")
    with pytest.raises(CheckpointMismatchError) as caught:
        store.claim("live", checkpoint, fresh=fresh, committed=committed)
    assert caught.value.reason == reason
    assert backend.open().claim("live", "checkpoint-1", fresh=False, committed=0).last_batch == 1


def test_an_old_checkpoint_and_an_empty_store_are_refused(backend: Backend) -> None:
    """A checkpoint that was used before does not go with a store that never saw it."""
    with pytest.raises(CheckpointMismatchError, match="deleted") as caught:
        backend.open().claim("live", "checkpoint-1", fresh=False, committed=3)
    assert caught.value.reason == "unknown"


def test_a_restart_goes_on_where_it_was(backend: Backend) -> None:
    """Everything is there after reopening: the last batch, the metrics' columns, the store's id."""
    store = backend.open()
    writer = Writer(store)
    writer.write(Measurement(30))
    store.close()
    again = backend.open()
    assert again.id == store.id
    assert again.register(writer.metrics) == writer.layout
    assert again.claim("live", "checkpoint-1", fresh=False, committed=None).last_batch == 0
    assert all_states(again) == expected_states(writer.metrics, [Measurement(30)])


def test_waiting_files_are_kept_until_dropped(backend: Backend) -> None:
    """Carried files survive a restart, oldest first, and go with the batch that drops them."""
    store = backend.open()
    writer = Writer(store)
    young, old = StreamFile("b", 0, 2000, 5), StreamFile("a", 0, 1000, 7)
    writer.write(add_files=[young, old])
    assert store.claim("live", "checkpoint-1", fresh=False, committed=0).state_files == (old, young)
    writer.claim = store.claim("live", "checkpoint-1", fresh=False, committed=0)
    writer.write(drop_files=["a"])
    assert store.claim("live", "checkpoint-1", fresh=False, committed=1).state_files == (young,)


def test_waiting_files_are_dropped_once(backend: Backend) -> None:
    """A batch cannot drop a file that is gone already: its writer's view of the stream is old."""
    store = backend.open()
    writer = Writer(store)
    writer.write(add_files=[StreamFile("a", 0, 1000, 7), StreamFile("b", 0, 1000, 7)])
    writer.write(Measurement(30), drop_files=["a"])
    before = all_states(store)
    again = writer.batch([Measurement(30)], drop_files=["b", "a"])
    with pytest.raises(StaleStateError, match="claim the stream again") as caught:
        store.commit(again)
    assert (caught.value.stream, caught.value.path) == ("live", "a")
    assert all_states(store) == before
    writer.claim = store.claim("live", "checkpoint-1", fresh=False, committed=1)
    assert [file.path for file in writer.claim.state_files] == ["b"]


def test_one_read_sees_one_moment(backend: Backend) -> None:
    """What is committed between two statements of a read does not show in it."""
    store, other = backend.open(), backend.open()
    writer = Writer(other)
    writer.write(Measurement(30))
    count = 'SELECT count(*) FROM "minute_Endpoint"'

    def work(session: Session) -> tuple[Any, Any, Any]:
        first = session.rows(count)
        writer.write(Measurement(40, minute=MINUTE + 1, entity="two"))
        return first, session.rows(count), session.rows("SELECT count(*) FROM entity")

    read = store._read
    assert read(work) == ([(1,)], [(1,)], [(1,)])
    assert read(lambda session: session.rows(count)) == [(2,)]


def test_a_reader_sees_whole_batches_only(backend: Backend) -> None:
    """While batches are being written, every read sees both entities of a batch, or neither."""
    writer = Writer(backend.open())
    reader = backend.open()
    failures: list[Any] = []
    seen: set[int] = set()
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            totals = [value.value for value in reader.values("calls")]
            seen.update(value for value in totals if isinstance(value, int))
            if len(totals) not in (0, 2) or len(set(totals)) > 1:
                failures.append(totals)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        number = 0
        while number < 20 or len(seen) < 3:
            writer.write(Measurement(number, entity="one"), Measurement(number, entity="two"))
            number += 1
    finally:
        stop.set()
        thread.join(WAIT_S)
    assert failures == []


def test_two_streams_are_written_at_once(backend: Backend) -> None:
    """A backfill in another process beside the live stream: every row of both is there."""
    store = backend.open()
    writer = Writer(store)
    with Life.of_script(WRITE, url=backend.url) as other:
        other.must_hear("ready")
        other.tell("go")
        for number in range(20):
            writer.write(Measurement(number, entity="both"), Measurement(2, entity="here"))
        other.must_hear("done")
    rows = [Measurement(number, entity="both") for number in range(20)] * 2
    rows += [Measurement(1, entity="there")] * 20 + [Measurement(2, entity="here")] * 20
    assert all_states(store) == expected_states(metrics(), rows)


def test_layers_add_up(backend: Backend) -> None:
    """An entity has every layer that any batch saw it in; of two texts the greater stays."""
    for order in (("a", "b"), ("b", "a")):
        store = backend.open()
        writer = Writer(store, stream=f"stream-{order[0]}", checkpoint=order[0])
        for number in order:
            row = EntityRow(
                "service", "shop", f"shop {number}", frozenset([number]), {"role": number}
            )
            writer.write(entities=[row])
        (entity,) = store.entities("service")
        assert (entity.name, set(entity.layers)) == ("shop b", {"a", "b"})
        assert entity.roles == {"role": "b"}


def test_entities_are_found(backend: Backend) -> None:
    """By kind, by part of the name in any case, and by layer; % and _ are plain characters."""
    store = backend.open()
    rows = [entity_row("/Cart"), entity_row("/pay_100%", ["MESH"]), entity_row("/payX100x")]
    Writer(store).write(entities=[*rows, EntityRow("service", "s", "cart")])
    assert [entity.name for entity in store.entities(name_like="cart")] == ["/Cart", "cart"]
    assert [entity.name for entity in store.entities("endpoint", "_100%")] == ["/pay_100%"]
    assert [entity.name for entity in store.entities(layer="MESH")] == ["/pay_100%"]


def test_odd_texts_come_back(backend: Backend) -> None:
    """Tabs, newlines, backslashes, quotes, emoji and the word None are kept as they are."""
    store = backend.open()
    names = ["a\tb\nc\\d\re", "None", "\\N", "q\"uote'", "naïve 🎉", "", "x\0y"]
    writer = Writer(store)
    writer.write(
        *(Measurement(5, name=name, entity=f"e{index}") for index, name in enumerate(names)),
        entities=[EntityRow("endpoint", f"id{i}", name) for i, name in enumerate(names)],
    )
    assert [entity.name for entity in store.entities()] == [*names[:-1], "x\ufffdy"]
    labels = [next(iter(row.states[0])) for row in store.states("statuses")]
    assert labels == names


def test_a_closed_store_says_so(backend: Backend) -> None:
    """After close() reading and writing are refused; closing twice is fine."""
    store = backend.open()
    writer = Writer(store)
    store.close()
    store.close()
    for call in (store.newest_minute, lambda: store.commit(writer.batch([]))):
        with pytest.raises(StoreClosedError, match="open it again"):
            call()


def test_errors_survive_pickling() -> None:
    """An error comes through pickle with its message and its attributes."""
    for error in (
        FencedError("live", 1, 2),
        BatchGapError("live", 3, 2),
        StaleStateError("live", "a"),
        LayoutChangedError("Endpoint", "c1", "a"),
        MetricConflictError("a", ("live",), "one", "two", False),
    ):
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))
