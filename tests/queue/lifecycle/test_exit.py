"""Interpreter exit: what was accepted is consumed, within the queue's timeout, and in silence."""

from __future__ import annotations

import pytest

from tests.kit.processes import run_script

PREAMBLE = """
import atexit, gc, os, sys, threading, time
from batchmill import (BatchQueue, BatchQueueSettings, BatchQueueManager, PartitionPolicy,
    ThreadPolicy, default_manager)

class Item:
    pass

seen = []

def handler(batch):
    seen.extend(batch)
    os.write(1, b"x" * len(batch))

def config(**settings):
    settings.setdefault("threads", ThreadPolicy.fixed(2))
    settings.setdefault("max_batch", 3)
    return BatchQueueSettings(partitions=PartitionPolicy.fixed(2), **settings)

queue = BatchQueue("q", config())
queue.add_handler(Item, handler)
"""

ENDINGS = {
    "end of the script": ("", 0),
    "sys.exit": ("sys.exit(3)", 3),
    "SystemExit in a function": ("(lambda: sys.exit(4))()", 4),
}


@pytest.mark.parametrize(("ending", "code"), ENDINGS.values(), ids=ENDINGS.keys())
def test_exit_drains(ending: str, code: int) -> None:
    """A queue that nobody shut down is drained at exit, whatever the way out."""
    done = run_script(f"{PREAMBLE}\nqueue.produce_many([Item() for _ in range(1000)])\n{ending}")
    assert (done.stdout, done.stderr, done.returncode) == ("x" * 1000, "", code)


def test_exit_by_an_exception_drains() -> None:
    """An uncaught exception leaves its own traceback and nothing else, and the queue drains."""
    done = run_script(PREAMBLE + "queue.produce_many([Item() for _ in range(1000)])\n1 / 0\n")
    assert (done.stdout, done.returncode) == ("x" * 1000, 1)
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_exit_by_ctrl_c_drains() -> None:
    """Ctrl-C at the top of a script drains the queue on the way out."""
    done = run_script(
        PREAMBLE + "queue.produce_many([Item() for _ in range(1000)])\nraise KeyboardInterrupt\n"
    )
    assert done.stdout == "x" * 1000
    assert done.stderr.count("Traceback") == 1


def test_exit_is_bounded() -> None:
    """A handler that hangs for ever delays the exit by the queue's timeout and no more.

    What it leaves behind is in the log: nothing is lost in silence.
    """
    done = run_script(
        PREAMBLE
        + """
hanging = [BatchQueue(f"hanging {n}", config(shutdown_timeout_ms=300)) for n in range(5)]
for hanging_queue in hanging:
    hanging_queue.add_handler(Item, lambda batch: threading.Event().wait())
    hanging_queue.produce(Item())
queue.produce_many([Item() for _ in range(100)])
"""
    )
    assert (done.stdout, done.returncode) == ("x" * 100, 0)
    assert done.stderr.count("not drained after 0.3 s; 1 item left") == 5


def test_managed_queues_drain_at_exit() -> None:
    """Queues of a manager, on a shared scheduler, are drained at exit like any other."""
    done = run_script(
        PREAMBLE
        + """
shared = config(threads=None, shared_scheduler=("pool", ThreadPolicy.fixed(2)))
for name in "abc":
    default_manager.create(name, shared).add_handler(Item, handler)
for name in "abc":
    default_manager.get(name).produce_many([Item() for _ in range(100)])
"""
    )
    assert (done.stdout, done.stderr, done.returncode) == ("x" * 300, "", 0)


def test_producers_still_running_at_exit() -> None:
    """Daemon threads that go on producing at exit are told False; what was accepted is consumed."""
    done = run_script(
        PREAMBLE
        + """
accepted = [0] * 4
ended = threading.Barrier(5)

def produce(me):
    while queue.produce(Item()):
        accepted[me] += 1
    ended.wait(60)

@atexit.register
def report():  # registered after batchmill's own hook, so run before it
    queue.shutdown()
    ended.wait(60)
    os.write(2, f"{sum(accepted) == len(seen)} {sum(accepted) >= 100}".encode())

for me in range(4):
    threading.Thread(target=produce, args=(me,), daemon=True).start()
while sum(accepted) < 100:
    pass
"""
    )
    assert (done.stderr, done.returncode) == ("True True", 0)


def test_handlers_see_a_whole_interpreter() -> None:
    """In the final drain handlers can import, log and print: the interpreter still stands."""
    done = run_script(
        PREAMBLE
        + """
def late(batch):
    import json, logging
    logging.getLogger("x").debug("here")
    print(json.dumps(len(batch)), flush=True)

other = BatchQueue("other", config(threads=ThreadPolicy.fixed(1), max_batch=100))
other.add_handler(Item, late)
other.add_handler(int, lambda batch: started.wait())
started = threading.Event()
other.produce_many([Item() for _ in range(10)])
started.set()
"""
    )
    assert (done.stdout, done.stderr, done.returncode) == ("10\n", "", 0)


def test_last_words_at_exit() -> None:
    """At exit too, each handler gets its last on_idle after its last batch."""
    done = run_script(
        PREAMBLE
        + """
class Merger:
    merged = 0

    def consume(self, batch):
        self.merged += len(batch)

    def on_shutdown(self):
        os.write(1, b"merged %d" % self.merged)

other = BatchQueue("other", config())
other.add_handler(Item, Merger())
other.produce_many([Item() for _ in range(1000)])
"""
    )
    assert (done.stdout, done.stderr, done.returncode) == ("merged 1000", "", 0)


def test_queue_shut_down_before_exit() -> None:
    """A queue that was shut down has no thread left and does nothing at exit."""
    done = run_script(
        PREAMBLE
        + """
queue.produce(Item())
queue.shutdown()
print([t.name for t in threading.enumerate() if t.name.startswith("batchmill")])
"""
    )
    assert (done.stdout, done.stderr, done.returncode) == ("x[]\n", "", 0)


@pytest.mark.parametrize("cycle", [False, True], ids=["dropped", "in a cycle"])
def test_collected_queue_drains_before_exit(cycle: bool) -> None:
    """A queue that was collected before the exit is waited for like one that was not.

    The garbage collector clears weak references to what is in a cycle before it runs finalisers.
    """
    done = run_script(
        "import atexit, os\natexit.register(os.write, 1, b'end')\n"  # after batchmill's own hook
        + PREAMBLE
        + f"""
exiting, in_handler = threading.Event(), threading.Event()

def slow(batch):
    in_handler.set()
    exiting.wait(60)
    threading.Event().wait(0.002)
    handler(batch)

def make():
    other = BatchQueue("other", config(threads=ThreadPolicy.fixed(1), max_batch=1))
    other.add_handler(Item, (lambda batch, keep=other: slow(batch)) if {cycle} else slow)
    return other

import weakref
other = make()
alive = weakref.ref(other)
lane = other._core.layout.lanes[Item]
task = other._core.tasks[0]
while task._submitted or task._run_lock.locked():
    pass
# The items are put without a wake, so that no thread holds on to the queue.
lane.partition.tokens.pop()
lane.partition.reserve -= 99
lane.buffer.extend([Item() for _ in range(100)])
del lane, task, other
gc.collect()
assert alive() is None
in_handler.wait(60)
atexit.register(exiting.set)
""",
        options=["-W", "ignore"],
    )
    assert (done.stdout, done.stderr, done.returncode) == ("x" * 100 + "end", "", 0)
