"""Declared downstream queues: closed after what passes items on to them, and an honest answer."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import pytest

from batchmill import (
    BatchQueue,
    BatchQueueManager,
    BufferStrategy,
    ConfigError,
    QueueConflictError,
)
from tests.kit.processes import Child, run_script
from tests.kit.queues import Green, Recorder, Red, fill, reds
from tests.kit.threads import WAIT_S, Gate, spawn, until
from tests.queue.kit import messages, parked_task
from tests.queue.manager.kit import config, pooled


class Merge(Recorder):
    """Keeps what it gets, and passes it on in its last call."""

    def __init__(self, pass_on: Callable[[list[Any]], object], gate: Gate | None = None) -> None:
        super().__init__(gate)
        self._pass_on = pass_on

    def on_shutdown(self) -> None:
        self._pass_on(self.items)


Chain = tuple[BatchQueue[Any], BatchQueue[Any], Recorder]


def chain(
    manager: BatchQueueManager, gate: Gate | None = None, declared: bool = True, **of_l2: Any
) -> Chain:
    """L1, whose handler passes everything on in its last call, L2, and what L2 gets."""
    store = Recorder()
    l2 = manager.create("l2", config(**({"consumer": store} | of_l2)))
    merge = Merge(l2.produce_many, gate)
    l1 = manager.create("l1", config(consumer=merge), downstream=["l2"] if declared else [])
    return l1, l2, store


def test_last_call_reaches_the_downstream(manager: BatchQueueManager) -> None:
    """What a handler passes on in its last call is accepted and consumed; the answer is True."""
    l1, _, store = chain(manager)
    l1.produce_many(reds(100))
    assert manager.shutdown_all()
    assert store.items == reds(100)
    assert manager.stats().lost == {}
    assert [stats.name for stats in manager.stats().shut_down] == ["l1", "l2"]


def test_downstream_stays_open_while_the_upstream_drains(manager: BatchQueueManager) -> None:
    """While a handler of L1 is in a call, L2 takes items; it closes after L1's last call."""
    gate = Gate()
    l1, l2, store = chain(manager, gate)
    l1.produce(Red())
    gate.wait_entered()
    over = spawn(manager.shutdown_all)
    until(lambda: not l1.running, "L1 is closed")
    assert l2.produce(Green())
    assert not over.done()
    gate.open()
    assert over.result(WAIT_S)
    assert store.items == [Green(), Red()]


def test_full_downstream_is_waited_for(manager: BatchQueueManager) -> None:
    """A BLOCKING downstream with little room takes all in turn."""
    l1, _, store = chain(manager, buffer_size=3)
    l1.produce_many(reds(100))
    assert manager.shutdown_all()
    assert store.items == reds(100)


def test_chain_closes_from_its_upper_end(manager: BatchQueueManager) -> None:
    """Of three queues in a row, declared by name or as they are, nothing is lost."""
    store = Recorder()
    last = manager.create("last", pooled(consumer=store))
    middle = manager.create("middle", pooled(consumer=Merge(last.produce_many)), downstream=[last])
    first = manager.create(
        "first", config(consumer=Merge(middle.produce_many)), downstream=[middle]
    )
    first.produce_many(reds(50))
    assert manager.shutdown_all()
    assert store.items == reds(50)
    assert [stats.name for stats in manager.stats().shut_down] == ["first", "middle", "last"]


def test_two_upstreams_of_one_queue(manager: BatchQueueManager) -> None:
    """It closes after both, whichever takes longer."""
    store, gate = Recorder(), Gate()
    l2 = manager.create("l2", config(consumer=store))
    slow = manager.create("slow", config(consumer=Merge(l2.produce_many, gate)), downstream=["l2"])
    fast = manager.create("fast", config(consumer=Merge(l2.produce_many)), downstream=["l2"])
    slow.produce(Red(1))
    gate.wait_entered()
    fast.produce(Red(2))
    over = spawn(manager.shutdown_all)
    store.wait_for(1)
    assert l2.running
    gate.open()
    assert over.result(WAIT_S)
    assert store.items == [Red(2), Red(1)]


def test_recreated_downstream_keeps_its_place(manager: BatchQueueManager) -> None:
    """The declaration is by name: a new queue of that name is closed after its upstream, too."""
    store = Recorder()

    def pass_on(items: list[Any]) -> None:
        queue = manager.get("l2")
        assert queue is not None
        queue.produce_many(items)

    manager.create("l2", config(consumer=store))
    l1 = manager.create("l1", config(consumer=Merge(pass_on)), downstream=["l2"])
    manager.shutdown("l2")
    manager.create("l2", config(consumer=store))
    l1.produce_many(reds(9))
    assert manager.shutdown_all()
    assert store.items == reds(9)


def test_get_or_create_adds_downstreams(manager: BatchQueueManager) -> None:
    """Several callers share L1, each with handlers that pass on to a queue of its own."""
    stores = {name: Recorder() for name in ("left", "right")}
    for (name, store), cls in zip(stores.items(), (Red, Green), strict=True):
        target = manager.create(name, config(consumer=store))
        shared = manager.get_or_create("l1", config(), downstream=[name])
        shared.add_handler(cls, Merge(target.produce_many))
    shared.produce_many([Red(1), Green(2)])
    assert manager.shutdown_all()
    assert (stores["left"].items, stores["right"].items) == ([Red(1)], [Green(2)])


def test_undeclared_hand_over_is_not_forgotten(
    manager: BatchQueueManager, caplog: pytest.LogCaptureFixture
) -> None:
    """Without the declaration L2 may refuse what L1 passes on: then the answer is False."""
    gate = Gate()
    l1, l2, store = chain(manager, gate, declared=False)
    l1.produce_many(reds(7))
    gate.wait_entered()
    over = spawn(manager.shutdown_all)
    until(lambda: l2._core.done.is_set(), "L2 has closed")
    gate.open()
    assert not over.result(WAIT_S)
    assert store.items == []
    assert manager.stats().lost == {"l1": {"refused_hand_overs": 7}}
    assert l1.stats().refused_hand_overs == {"l2": 7}
    assert any("7 by l2" in said and "downstream=" in said for said in messages(caplog))


def test_hand_over_refused_by_a_full_downstream(manager: BatchQueueManager) -> None:
    """A declared downstream that drops what does not fit loses it: counted, and False."""
    gate = Gate()
    l1, l2, _ = chain(manager, consumer=gate, buffer_size=4, strategy=BufferStrategy.IF_POSSIBLE)
    l2.produce(Red())
    gate.wait_entered()
    fill(l2)
    l1.produce_many(reds(5))
    over = spawn(manager.shutdown_all)
    until(lambda: l1._core.done.is_set(), "L1 has ended")
    gate.open()
    assert not over.result(WAIT_S)
    assert manager.stats().lost == {"l1": {"refused_hand_overs": 5}}


def test_refusal_of_an_open_queue_that_is_not_declared(manager: BatchQueueManager) -> None:
    """A handler may offer copies to a queue that drops some: that loses nothing accepted."""
    gate = Gate()
    copies = manager.create(
        "copies", config(consumer=gate, buffer_size=1, strategy=BufferStrategy.IF_POSSIBLE)
    )
    copies.produce(Red())
    gate.wait_entered()
    fill(copies)
    l1 = manager.create("l1", config(consumer=copies.produce_many))
    l1.produce_many(reds(5))
    assert l1.flush(WAIT_S)
    gate.open()
    assert manager.shutdown_all()


def test_failed_items_are_lost(
    manager: BatchQueueManager, caplog: pytest.LogCaptureFixture
) -> None:
    """Items whose handler raised, also long before, make the answer False."""

    def fail(batch: list[Any]) -> None:
        raise ValueError("no")

    queue = manager.create("failing", config(consumer=fail))
    queue.produce_many(reds(3))
    assert queue.flush(WAIT_S)
    assert not manager.shutdown_all()
    assert manager.stats().lost == {"failing": {"failed": 3}}
    assert any("failing: not all that it accepted got through" in said for said in messages(caplog))


def test_items_without_a_handler_are_lost(manager: BatchQueueManager) -> None:
    """Accepted, but nobody took them."""
    manager.create("strangers", config()).produce_many(reds(2))
    assert not manager.shutdown_all()
    assert manager.stats().lost == {"strangers": {"unregistered": 2}}


@pytest.mark.parametrize("method", ["on_idle", "on_shutdown"])
def test_failed_last_call_is_a_loss(manager: BatchQueueManager, method: str) -> None:
    """What a handler had merged by its last call is lost if that fails."""

    def fail(handler: object) -> None:
        raise OSError("disk full")

    handler = type("Handler", (Recorder,), {method: fail})()
    reports: list[BaseException] = []
    settings = config(consumer=handler, error_handler=lambda batch, error: reports.append(error))
    manager.create("merging", settings).produce(Red())
    assert not manager.shutdown_all()
    assert manager.stats().lost == {"merging": {"failed_last_calls": 1}}
    assert isinstance(reports[-1], OSError)


def test_upstream_out_of_time(manager: BatchQueueManager) -> None:
    """After L1's timeout L2 is closed all the same, and what is left in L1 is said."""
    gate, store = Gate(), Recorder()
    l2 = manager.create("l2", config(consumer=store))
    hanging = config(consumer=Merge(l2.produce_many, gate), max_batch=1, shutdown_timeout_ms=1)
    l1 = manager.create("l1", hanging, downstream=["l2"])
    l1.produce_many(reds(3))
    gate.wait_entered()
    l2.produce(Green())
    assert not manager.shutdown_all()
    assert not l2.running
    assert store.items == [Green()]
    assert manager.stats().lost == {"l1": {"not_drained": 3}}
    gate.open()
    assert l1._core.done.wait(WAIT_S)
    assert not manager.get("l1")


def test_two_queues_of_one_name_are_both_waited_for(manager: BatchQueueManager) -> None:
    """A queue that still hangs when its name is used again is not forgotten."""
    gate = Gate()
    for _ in range(2):
        queue = manager.create("again", config(consumer=gate, max_batch=1, shutdown_timeout_ms=1))
        queue.produce_many(reds(3))
        gate.wait_entered()
        assert not queue.shutdown()
    assert not manager.shutdown_all()
    assert manager.stats().lost == {"again": {"not_drained": 6}}
    gate.open()
    assert queue._core.done.wait(WAIT_S)


@pytest.mark.parametrize(
    ("declare", "path"),
    [
        (lambda m: m.create("new", config(), downstream=["new"]), "new -> new"),
        (lambda m: m.get_or_create("b", config(), downstream=["a"]), "b -> a -> b"),
        (lambda m: m.get_or_create("c", config(), downstream=["a"]), "c -> a -> b -> c"),
    ],
    ids=["itself", "two", "three"],
)
def test_cycle_is_refused(
    manager: BatchQueueManager, declare: Callable[[BatchQueueManager], object], path: str
) -> None:
    """None of them could be closed first; the error has the way back."""
    manager.create("c", config())
    manager.create("b", config(), downstream=["c"])
    manager.create("a", config(), downstream=["b"])
    with pytest.raises(QueueConflictError) as caught:
        declare(manager)
    assert path in str(caught.value)
    assert manager.names() == ("c", "b", "a")


def test_cycle_through_a_new_queue_of_an_old_name(manager: BatchQueueManager) -> None:
    """A declaration holds for the name."""
    manager.create("b", config())
    manager.create("a", config(), downstream=["b"])
    manager.shutdown("b")
    with pytest.raises(QueueConflictError, match="b -> a -> b"):
        manager.create("b", config(), downstream=["a"])


def test_downstream_must_run_in_this_manager(manager: BatchQueueManager) -> None:
    """A name nobody has, a closed queue, another manager's, a text for a list: each an error."""
    closed = manager.create("closed", config())
    closed.shutdown()
    other = BatchQueueManager()
    foreign = other.create("foreign", config())
    wrong: list[Any] = [["stranger"], [closed], [foreign], [3], "closed"]
    for downstream in wrong:
        with pytest.raises(ConfigError, match="create downstream queues first"):
            manager.create("new", config(), downstream=downstream)
    assert manager.names() == ()
    assert other.shutdown_all()


def test_shutdown_all_in_a_handler(manager: BatchQueueManager) -> None:
    """It answers False at once, and the queues end in order when the handler has returned."""
    answers: list[bool] = []
    l1, l2, store = chain(manager)
    l1.produce(Red(1))
    ender = manager.create(
        "ender", config(consumer=lambda _: answers.append(manager.shutdown_all()))
    )
    ender.produce(Red())
    assert l2._core.done.wait(WAIT_S)
    assert answers == [False]
    assert store.items == [Red(1)]
    until(lambda: manager.stats().shut_down, "the background shutdown is over")
    assert manager.stats().lost == {}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork()")
def test_downstream_in_a_forked_child(manager: BatchQueueManager) -> None:
    """The child's queues have the same order; the counts of the parent's losses are not its own."""
    gate = Gate()
    l1, _, store = chain(manager, gate)
    l1.produce(Red(1))
    gate.wait_entered()

    def child() -> None:
        gate.open()
        l1.produce_many(reds(50))
        if not manager.shutdown_all() or manager.stats().lost:
            raise AssertionError(manager.stats())
        if store.items != reds(50):
            raise AssertionError(store.items)

    Child(child).succeeds()
    gate.open()
    assert manager.shutdown_all()
    assert store.items == [Red(1)]


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_garbage_queues_close_in_order() -> None:
    """A manager that nobody refers to any more: L2 waits for what L1 passes on."""
    gate, store = Gate(), Recorder()
    manager = BatchQueueManager()
    l1, l2, _ = chain(manager, gate, consumer=store)
    l1.produce_many(reds(5))
    gate.wait_entered()
    ends = [l1._core.done, l2._core.done]
    for queue in (l2, l1):
        queue._core.abandon()  # as the finalisers do, in whichever order
    parked_task(l2._core.tasks[0])
    assert l2.running
    del manager, l1, l2, queue
    gc.collect()
    gate.open()
    assert [end.wait(WAIT_S) for end in ends] == [True, True]
    assert store.items == reds(5)


PREAMBLE = """
import multiprocessing, os
from batchmill import BatchQueueSettings, ThreadPolicy, default_manager as manager

class Merge:
    def __init__(self, pass_on):
        self.items, self.pass_on = [], pass_on

    def consume(self, batch):
        self.items += batch

    def on_shutdown(self):
        self.pass_on(self.items)

def config(consumer, **settings):
    return BatchQueueSettings(
        threads=ThreadPolicy.fixed(1), consumer=consumer, buffer_size=10, **settings)

def write(batch):
    os.write(1, b"x" * len(batch))

queues = [manager.create("q0", config(write))]
for index in range(1, 5):
    queues.append(manager.create(f"q{index}", config(Merge(queues[-1].produce_many)),
        downstream=[queues[-1]]))
"""


def test_exit_closes_upstream_first() -> None:
    """At interpreter exit, too, everything gets through a chain of five queues."""
    done = run_script(f"{PREAMBLE}\nqueues[-1].produce_many(range(1000))")
    assert (done.stdout, done.stderr, done.returncode) == ("x" * 1000, "", 0)


def test_exit_of_a_forked_child_closes_upstream_first() -> None:
    """A child of multiprocessing leaves by another way, in the same order."""
    done = run_script(
        PREAMBLE
        + """
process = multiprocessing.get_context("fork").Process(
    target=queues[-1].produce_many, args=(range(1000),))
process.start()
process.join()
"""
    )
    assert (done.stdout, done.stderr, done.returncode) == ("x" * 1000, "", 0)


def test_exit_says_what_was_refused() -> None:
    """A hand-over that was not declared, and refused at exit, is in the log."""
    done = run_script(
        PREAMBLE
        + """
import threading
entered = threading.Event()

class Late(Merge):
    def consume(self, batch):
        entered.set()
        queues[-1]._core.done.wait(60)
        super().consume(batch)

late = manager.create("late", config(Late(queues[-1].produce_many)))
late.produce_many(range(7))
entered.wait(60)
"""
    )
    assert (done.stdout, done.returncode) == ("", 0)
    assert "late: items that its handlers passed on were refused: 7 by q4" in done.stderr
