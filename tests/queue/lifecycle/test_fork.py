"""fork: the child's queues are empty, running and its own; the parent's items are the parent's."""

from __future__ import annotations

import multiprocessing
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from batchmill import BatchQueue, BatchQueueManager, BatchQueueSettings, ThreadPolicy
from tests.kit.processes import Child, run_script
from tests.kit.queues import Recorder, make_queue, new_queue
from tests.kit.threads import SOAK, WAIT_S, Gate, spawn, until
from tests.queue.kit import A, B, parked, partition_of

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork()")


def _check(condition: object, what: object) -> None:
    """A plain assert, but one that pytest need not rewrite: it runs in a child."""
    if not condition:
        raise AssertionError(what)


def _works(queue: BatchQueue[Any], recorder: Recorder, count: int = 100) -> None:
    """Produce and consume, from an empty queue to an empty queue."""
    recorder.batches.clear()
    _check(queue.running, "the queue runs")
    items = [A() for _ in range(count)]
    _check(queue.produce(items[0]), "the first is accepted")
    _check(queue.produce_many(items[1:]) == count - 1, "the rest is accepted")
    _check(queue.flush(WAIT_S / 2), queue.stats())
    _check(recorder.items == items, (len(recorder.items), queue.stats()))


def test_child_starts_empty_and_works() -> None:
    """The child's queue has none of the parent's items and counters, and runs."""
    with make_queue(threads=2, partitions=2) as queue, Gate() as gate:
        recorder = Recorder(gate)
        queue.add_handler(A, recorder)
        queue.produce(A())
        gate.wait_entered()
        queue.produce_many([A() for _ in range(50)])

        def child() -> None:
            stats = queue.stats()
            _check((stats.accepted, stats.total_used, stats.consumed) == (0, 0, 0), stats)
            recorder.__init__()  # type: ignore[misc]
            _works(queue, recorder)
            _check(queue.shutdown(), "the child's queue ends")

        Child(child).succeeds()
        gate.open()
        assert len(recorder.wait_for(51)) == 51
        assert queue.stats().consumed == 51


def test_parked_queue_wakes_in_the_child() -> None:
    """A child's queue that has parked before the first item comes is woken by it."""
    recorder = Recorder()
    with make_queue(threads=2, partitions=2) as queue:
        queue.add_handler(A, recorder)
        queue.produce(A())
        recorder.wait_for(1)
        parked(queue)

        def child() -> None:
            recorder.__init__()  # type: ignore[misc]
            parked(queue)
            _check(queue.produce(A()), "accepted")
            recorder.wait_for(1, WAIT_S / 3)
            parked(queue)
            _works(queue, recorder)

        Child(child).succeeds()


def test_parents_items_are_consumed_once() -> None:
    """What the parent had queued is consumed by the parent, and by nobody else."""
    reader, writer = os.pipe()
    with make_queue(max_batch=1) as queue, Gate() as gate:

        def handler(batch: list[A]) -> None:
            gate.wait()
            os.write(writer, b"c" if os.getpid() != parent else b"p")

        parent = os.getpid()
        queue.add_handler(A, handler)
        queue.produce(A())
        gate.wait_entered()
        queue.produce_many([A() for _ in range(9)])

        def child() -> None:
            gate.open()
            queue.produce(A())
            _check(queue.shutdown(), "the child's queue ends")

        Child(child).succeeds()
        gate.open()
        assert queue.flush(WAIT_S)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        assert pipe.read() == b"c" + b"p" * 10


def test_full_capacity_in_the_child() -> None:
    """Slots that the parent's producers held at the fork are all there in the child."""
    with make_queue(buffer_size=5) as queue, Gate() as gate:
        queue.add_handler(A, Recorder(gate))
        queue.produce(A())
        gate.wait_entered()
        queue.produce_many([A() for _ in range(5)])
        blocked = spawn(queue.produce, A())
        until(lambda: partition_of(queue).waiters, "a producer waits")

        def child() -> None:
            partition = partition_of(queue)
            _check(partition.reserve + len(partition.tokens) == 5, "all slots are home")
            _check(not partition.waiters, "nobody waits")

        Child(child).succeeds()
        gate.open()
        assert blocked.result()


class Counter:
    """A handler that counts, so the process to copy stays small; or a child's recorder."""

    count = 0
    recorder: Recorder | None = None

    def consume(self, batch: list[Any]) -> None:
        if self.recorder is not None:
            self.recorder.consume(batch)
        self.count += len(batch)


@pytest.mark.system
def test_fork_under_fire() -> None:
    """A fork at any moment of hard work gives a child whose queue works."""
    first, second = Counter(), Counter()
    stop = threading.Event()
    queue = new_queue(threads=3, partitions=4, buffer_size=16, max_batch=5)

    def produce(item: type) -> None:
        while not stop.is_set():
            queue.produce(item())
            queue.produce_many([item() for _ in range(9)])

    def child() -> None:
        first.recorder = Recorder()
        _works(queue, first.recorder)
        _check(queue.shutdown(), "the child's queue ends")

    with queue:
        queue.add_handler(A, first)
        queue.add_handler(B, second)
        producers = [spawn(produce, item) for item in (A, B, A, B)]
        try:
            for _ in range(20 * SOAK):
                Child(child).succeeds()
        finally:
            stop.set()
            for producer in producers:
                producer.result()
    stats = queue.stats()
    assert stats.accepted == stats.consumed == first.count + second.count


def test_fork_while_closing() -> None:
    """A queue that was closing at the fork is closed, and done, in the child."""
    with make_queue() as queue, Gate() as gate:
        queue.add_handler(A, Recorder(gate))
        queue.produce(A())
        gate.wait_entered()
        queue._core.begin_close()

        def child() -> None:
            _check(not queue.running, "it is closed")
            _check(queue.produce(A()) is False, "it takes nothing")
            _check(queue.shutdown(), "it is done")

        Child(child).succeeds()


def test_manager_and_shared_scheduler_in_the_child() -> None:
    """The child's manager has the queues, on a scheduler of its own, and can create more."""
    manager = BatchQueueManager()
    config = BatchQueueSettings(shared_scheduler=("pool", ThreadPolicy.fixed(2)))
    first, second = manager.create("first", config), manager.create("second", config)
    recorders = [Recorder(), Recorder()]
    first.add_handler(A, recorders[0])
    second.add_handler(A, recorders[1])

    def child() -> None:
        for queue, recorder in zip((first, second), recorders, strict=True):
            _check(manager.get(queue.name) is queue, "the manager knows it")
            _works(queue, recorder)
        third = manager.create("third", config)
        recorder = Recorder()
        third.add_handler(A, recorder)
        _works(third, recorder)
        _check(first._core.scheduler is third._core.scheduler, "they share")
        _check(manager.shutdown_all(), "all end")
        _check(not any(thread.is_alive() for thread in first._core.scheduler.threads), "all gone")

    Child(child).succeeds()
    _works(first, recorders[0])
    assert manager.shutdown_all()


def test_fork_while_a_manager_is_in_use() -> None:
    """A manager's lock that was held at the fork does not stop the child, whatever is closing."""
    manager = BatchQueueManager()
    queue = manager.create("closing", BatchQueueSettings(threads=ThreadPolicy.fixed(1)))
    with Gate() as gate:
        queue.add_handler(A, Recorder(gate))
        queue.produce(A())
        gate.wait_entered()
        queue._core.begin_close()
        with Gate() as inside:

            def hold() -> None:
                with manager._lock:
                    inside.wait()

            holder = spawn(hold)
            inside.wait_entered()
            child = Child(lambda: manager.create("new", queue.config).shutdown())
            try:
                child.succeeds()
            finally:
                inside.open()
                holder.result()
    assert manager.shutdown_all()


def test_fork_inside_a_handler() -> None:
    """A handler that forks has in the child a queue like any other: it can be flushed and ended."""
    children: list[Child] = []

    def handler(batch: list[A]) -> None:
        def work() -> None:
            recorder = Recorder()
            queue.add_handler(B, recorder)
            _check(queue.produce(B()), "accepted")
            _check(queue.flush(WAIT_S / 2), queue.stats())
            _check(len(recorder.items) == 1, "consumed")
            _check(queue.shutdown(), "ended")

        children.append(Child(work))

    with make_queue() as queue:
        queue.add_handler(A, handler)
        queue.produce(A())
        assert queue.flush(WAIT_S)
        children[0].succeeds()


def test_fork_while_a_queue_is_being_made() -> None:
    """A queue that another thread was just making at the fork does not delay the child's exit."""
    script = """
import os, threading
from batchmill import BatchQueue, BatchQueueSettings, ThreadPolicy
from batchmill.queue.scheduler import Scheduler

start = Scheduler._start_threads
reached, go_on = threading.Event(), threading.Event()

parent = os.getpid()

def slow_start(self):
    reached.set()
    if os.getpid() == parent:
        go_on.wait(60)
    start(self)

Scheduler._start_threads = slow_start
maker = threading.Thread(target=BatchQueue, args=("q", BatchQueueSettings(
    threads=ThreadPolicy.fixed(1), shutdown_timeout_ms=600_000)))
maker.start()
reached.wait(60)
pid = os.fork()
if pid == 0:
    import atexit
    atexit._run_exitfuncs()
    os._exit(0)
go_on.set()
maker.join()
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    done = run_script(script, options=["-W", "ignore"])
    assert done.stdout == "0\n"


@pytest.fixture
def consumed(tmp_path: Path) -> Path:
    """A file that handlers in other processes write to."""
    path = tmp_path / "consumed"
    path.touch()
    return path


def test_multiprocessing_child_drains_before_it_leaves(consumed: Path) -> None:
    """A forked multiprocessing child that returns without shutdown has its items consumed."""
    context = multiprocessing.get_context("fork")

    def handler(batch: list[A]) -> None:
        with consumed.open("a") as file:
            file.write("x" * len(batch))

    with make_queue(max_batch=3) as queue:
        queue.add_handler(A, handler)
        process = context.Process(target=lambda: queue.produce_many([A() for _ in range(100)]))
        process.start()
        process.join(WAIT_S)
        assert process.exitcode == 0
    assert consumed.read_text() == "x" * 100


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_multiprocessing_child_makes_its_own_queue(
    method: str, tmp_path: Path, consumed: Path
) -> None:
    """A queue made in a multiprocessing child, however it was started, drains before it leaves.

    The parent knows nothing of batchmill, so no hook of ours ran when it forked.
    """
    module = tmp_path / "work_of_child.py"
    module.write_text(
        f"""
def work():
    from batchmill import BatchQueue, BatchQueueSettings, ThreadPolicy

    def handler(batch):
        with open({str(consumed)!r}, "a") as file:
            file.write("x" * len(batch))

    queue = BatchQueue("q", BatchQueueSettings(threads=ThreadPolicy.fixed(1), max_batch=3))
    queue.add_handler(int, handler)
    queue.produce_many(list(range(100)))
    global kept
    kept = queue
"""
    )
    script = f"""
import multiprocessing, sys
sys.path.insert(0, {str(tmp_path)!r})
if __name__ == "__main__":
    import work_of_child
    process = multiprocessing.get_context({method!r}).Process(target=work_of_child.work)
    process.start()
    process.join(100)
    print(process.exitcode)
"""
    done = run_script(script)
    assert (done.stdout, done.stderr) == ("0\n", "")
    assert consumed.read_text() == "x" * 100
