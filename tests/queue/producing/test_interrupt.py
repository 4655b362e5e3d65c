"""An exception out of nowhere (Ctrl-C) in the middle of a call costs the queue nothing for good."""

from __future__ import annotations

import json
from collections import deque
from typing import Any

import pytest

from batchmill import BatchQueue
from batchmill.queue import task as task_module
from tests.kit.processes import run_script
from tests.kit.queues import Recorder, make_queue, new_queue
from tests.kit.threads import WAIT_S, Gate, spawn, until
from tests.queue.kit import A, lane_of, parked, partition_of


@pytest.fixture
def _soon_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots that stay out are given up after a few looks, not after a second."""
    monkeypatch.setattr(task_module, "_LOST_AFTER_NS", 0)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _fill(queue: BatchQueue[Any], gate: Gate) -> None:
    assert queue.produce(A())
    gate.wait_entered()
    for _ in range(partition_of(queue).capacity):
        assert queue.produce(A(), timeout=0)


PREAMBLE = """
import signal, sys, threading, time
from batchmill import BatchQueue, BatchQueueSettings, PartitionPolicy, ThreadPolicy

# A shell that starts the tests in the background has Ctrl-C ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

class Item:
    def __init__(self, number=0):
        self.number = number

release, entered, seen = threading.Event(), threading.Event(), []

def handler(batch):
    entered.set()
    release.wait(60)
    seen.extend(item.number for item in batch)

out = threading.Event()

def press_until_out():
    # A signal that comes between the interpreter's last look and its going to sleep is noticed
    # only when it wakes: CPython's own gap, which a second signal closes.
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    while not out.wait(1):
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

def config(**settings):
    return BatchQueueSettings(threads=ThreadPolicy.fixed(1), shutdown_timeout_ms=60_000, **settings)
"""


def test_ctrl_c_while_produce_waits() -> None:
    """Ctrl-C gets a producer out of its wait; its item is not queued, and the queue works on."""
    script = (
        PREAMBLE
        + """
queue = BatchQueue("q", config(buffer_size=2))
queue.add_handler(Item, handler)
queue.produce(Item(0))
entered.wait(60)
queue.produce(Item(1)); queue.produce(Item(2))
partition = queue._core.layout.partitions[0]

def press():
    while not partition.waiters:
        pass
    press_until_out()

threading.Thread(target=press, daemon=True).start()
try:
    queue.produce(Item(99))
except KeyboardInterrupt:
    out.set()
    print("interrupted", len(partition.waiters))
release.set()
assert queue.flush(60)
assert queue.produce(Item(3))
assert queue.shutdown()
print(seen, partition.out)
"""
    )
    done = run_script(script)
    assert (done.stdout, done.stderr) == ("interrupted 0\n[0, 1, 2, 3] 0\n", "")


@pytest.mark.parametrize("call", ["queue.flush()", "queue.shutdown()"])
def test_ctrl_c_while_waiting_for_the_drain(call: str) -> None:
    """Ctrl-C gets out of flush and shutdown too, and a later shutdown drains everything."""
    script = (
        PREAMBLE
        + f"""
queue = BatchQueue("q", config())
queue.add_handler(Item, handler)
queue.produce(Item(0))
entered.wait(60)
queue.produce(Item(1))
main = threading.main_thread()

def press():
    while not waiting():
        pass
    press_until_out()

def waiting():
    frame = sys._current_frames().get(main.ident)
    names = set()
    while frame is not None:
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    return "wait" in names and ("flush" in names or "shutdown" in names)

threading.Thread(target=press, daemon=True).start()
try:
    {call}
except KeyboardInterrupt:
    out.set()
    print("interrupted")
release.set()
assert queue.shutdown()
print(seen)
"""
    )
    done = run_script(script)
    assert (done.stdout, done.stderr) == ("interrupted\n[0, 1]\n", "")


@pytest.mark.parametrize("selector", ["type_hash()", "key_hash(lambda item: item.number % 5)"])
@pytest.mark.parametrize("many", [False, True], ids=["produce", "produce_many"])
def test_hammered_with_exceptions(selector: str, many: bool) -> None:
    """Thousands of exceptions in the middle of produce: nothing accepted is lost or doubled.

    Afterwards every slot is to be had again, and shutdown finishes.
    """
    by_type = selector == "type_hash()"
    script = (
        PREAMBLE
        + f"""
import json
from batchmill import PartitionSelector
MANY = {many}
queue = BatchQueue("q", config(
    buffer_size=8, partitions=PartitionPolicy.fixed(2), selector=PartitionSelector.{selector}))
release.set()
queue.add_handler(Item, handler)
armed = False
hits = 0

class Stop(Exception):
    pass

def on_alarm(*_):
    global armed, hits
    if armed:
        armed = False
        hits += 1
        raise Stop

signal.signal(signal.SIGALRM, on_alarm)
signal.setitimer(signal.ITIMER_REAL, 0.0001, 0.0001)
sure, maybe = [], []
number = 0
end = time.monotonic() + 15
while hits < 3000 and time.monotonic() < end:
    if MANY:
        items = [Item(number + at) for at in range(3)]
    else:
        items = [Item(number)]
    number += len(items)
    numbers = [item.number for item in items]
    try:
        armed = True
        count = queue.produce_many(items, 60) if MANY else queue.produce(items[0], 60)
        armed = False
    except Stop:
        maybe.extend(numbers)
    else:
        assert count == len(items), count
        sure.extend(numbers)
armed = False
signal.setitimer(signal.ITIMER_REAL, 0)

partitions = queue._core.layout.partitions
flushed = queue.flush(60)
end = time.monotonic() + 60
while any(p.out for p in partitions) and time.monotonic() < end:
    time.sleep(0.01)
out = [p.out for p in partitions]
waiters = [len(p.waiters) for p in partitions]
recovered = queue.stats().recovered_slots
ended = queue.shutdown()
print(json.dumps(dict(
    hits=hits, flushed=flushed, out=out, waiters=waiters, recovered=recovered, ended=ended,
    lost=len(set(sure) - set(seen)), doubled=len(seen) - len(set(seen)),
    unknown=len(set(seen) - set(sure) - set(maybe)),
    disordered=seen != sorted(seen) and {by_type},
)))
"""
    )
    done = run_script(script)
    assert done.stderr == ""
    report = json.loads(done.stdout)
    assert report.pop("hits") > 100
    report.pop("recovered")
    assert report == {
        "flushed": True,
        "out": [0, 0],
        "waiters": [0, 0],
        "ended": True,
        "lost": 0,
        "doubled": 0,
        "unknown": 0,
        "disordered": False,
    }


@pytest.mark.usefixtures("_soon_lost")
def test_interrupted_between_slot_and_put() -> None:
    """The slot of a producer that was interrupted before its put is replaced, in time."""
    with make_queue(buffer_size=4, max_idle_ms=1) as queue, Gate() as gate:
        recorder = Recorder(gate)
        queue.add_handler(A, recorder)
        parked(queue)
        queue._lane(A())
        take, _ = queue._routes[A]
        queue._routes[A] = (take, _interrupt)
        with pytest.raises(KeyboardInterrupt):
            queue.produce(A())
        queue._routes[A] = lane_of(queue, A).route
        until(lambda: partition_of(queue).out == 0, "the slot comes home", WAIT_S / 3)
        assert queue.stats().recovered_slots == 1
        _fill(queue, gate)
        gate.open()
        recorder.wait_for(5)


@pytest.mark.usefixtures("_soon_lost")
def test_interrupted_in_the_slow_road() -> None:
    """Slots claimed by a produce_many that was interrupted before its put are replaced."""

    class Interrupting(list[Any]):
        def extend(self, items: Any) -> None:
            lane.buffer = plain
            raise KeyboardInterrupt

    with make_queue(buffer_size=4, max_idle_ms=1) as queue:
        recorder = Recorder()
        queue.add_handler(A, recorder)
        lane = lane_of(queue, A)
        queue.produce(A())
        recorder.wait_for(1)
        parked(queue)
        plain = lane.buffer
        lane.buffer = Interrupting()
        with pytest.raises(KeyboardInterrupt):
            queue.produce_many([A(), A(), A()])
        until(lambda: partition_of(queue).out == 0, "the slots come home", WAIT_S / 3)
        assert queue.produce(A())
        recorder.wait_for(2)


@pytest.mark.usefixtures("_soon_lost")
def test_producer_waits_for_a_lost_slot() -> None:
    """A producer that waits for room while the last slot is lost gets the one that replaces it."""
    queue = new_queue(buffer_size=1, max_idle_ms=1)
    recorder = Recorder()
    queue.add_handler(A, recorder)
    queue.produce(A())
    recorder.wait_for(1)
    parked(queue)
    partition = partition_of(queue)
    queue._routes[A] = (partition.tokens.pop, _interrupt)
    with pytest.raises(KeyboardInterrupt):
        queue.produce(A())
    queue._routes[A] = lane_of(queue, A).route
    producer = spawn(queue.produce, A())
    try:
        assert producer.result(WAIT_S / 3)
    finally:
        queue.shutdown()


@pytest.mark.usefixtures("_soon_lost")
def test_only_the_partition_that_lost_a_slot_gets_one() -> None:
    """A producer on its way in one partition is not taken for lost because another one was.

    What would follow is a partition that holds more than it may.
    """
    with make_queue(partitions=2, buffer_size=4, max_idle_ms=1) as queue:
        losing, other = partition_of(queue, 0), partition_of(queue, 1)
        queue.add_handler(A, Recorder())
        parked(queue)
        task = queue._core.tasks[0]
        losing.tokens.pop()
        queue._core.interruptions = 1
        with task._run_lock:  # the task stands still: its looks are made here
            for _ in range(task_module._LOST_AFTER_CHECKS - 1):
                task._recover_lost_slots({losing})
            other.tokens.pop()  # a producer takes its slot in the other partition
            task._recover_lost_slots({losing, other})
        assert losing.out == 0
        held = other.out
        other.reserve += held  # and gives it back
        assert held == 1


def test_interrupted_while_it_rings() -> None:
    """A producer interrupted just before it hands the task to the scheduler kills no task."""
    queue = new_queue(shutdown_timeout_ms=WAIT_S / 3 * 1000)
    recorder = Recorder()
    queue.add_handler(A, recorder)
    parked(queue)
    task = queue._core.tasks[0]
    submit = task._submit

    def interrupt(task: task_module.DrainTask) -> None:
        task._submit = submit
        raise KeyboardInterrupt

    task._submit = interrupt
    with pytest.raises(KeyboardInterrupt):
        queue.produce(A())
    assert queue.produce(A())
    flushed = queue.flush(WAIT_S / 3)
    submit(task)  # let it end in any case
    assert queue.shutdown()
    assert flushed


def test_interrupted_while_it_joins_the_waiters() -> None:
    """A producer interrupted just as it begins to wait leaves no waiter that swallows a wake."""

    class Interrupting(deque[Any]):
        def append(self, waiter: Any) -> None:
            super().append(waiter)
            partition.waiters = deque(self)
            raise KeyboardInterrupt

    queue = new_queue(buffer_size=1)
    partition = partition_of(queue)
    with Gate() as gate:
        queue.add_handler(A, Recorder(gate))
        _fill(queue, gate)
        partition.waiters = Interrupting()
        with pytest.raises(KeyboardInterrupt):
            queue.produce(A())
        before = len(partition.waiters)
        producer = spawn(queue.produce, A())
        until(lambda: len(partition.waiters) == before + 1, "another producer waits")
        gate.open()
        try:
            assert producer.result(WAIT_S / 3)
        finally:
            queue.shutdown()


def test_interrupted_in_the_middle_of_shutdown() -> None:
    """A shutdown interrupted just after it closed the gate can be done again, and finishes."""
    queue = new_queue(shutdown_timeout_ms=WAIT_S / 3 * 1000)
    recorder = Recorder()
    queue.add_handler(A, recorder)
    queue.produce(A())
    layout = queue._core.layout
    close = layout.close

    def close_and_interrupt() -> None:
        layout.close = close  # type: ignore[method-assign]
        close()
        raise KeyboardInterrupt

    layout.close = close_and_interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        queue.shutdown()
    finished = queue.shutdown()
    queue._core.closing = True  # let it end in any case
    queue._core.wake_tasks()
    queue.shutdown()
    assert finished
    assert len(recorder.items) == 1
