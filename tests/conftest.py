"""Every test is checked for threads it leaves behind; none fails because the machine was busy."""

from __future__ import annotations

import gc
import importlib.metadata
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings

from tests.kit.files import ROOT
from tests.kit.servers.hadoop import hdfs, s3
from tests.kit.servers.kafka import kafka, kafka_server
from tests.kit.servers.postgres import postgres, postgres_server, postgres_url
from tests.kit.spark import spark
from tests.kit.threads import may_last

if TYPE_CHECKING:
    from tests.kit.stores import Backend

__all__ = [
    "backend",
    "empty_backend",
    "hdfs",
    "kafka",
    "kafka_server",
    "no_leaked_threads",
    "postgres",
    "postgres_server",
    "postgres_url",
    "s3",
    "spark",
]

# Examples of a property test that names no number of its own: ``make test`` tries few, ``make
# test-system`` runs the test again with many (``-m property``). How long an example takes says
# nothing: the first one imports what it needs, and the machine may be busy with other work.
EXAMPLES = {"few": 30, "many": 100}
for profile, examples in EXAMPLES.items():
    settings.register_profile(
        profile,
        settings.default,
        max_examples=examples,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile("few")


# PySpark 4.1 leaves the socket of a result to the garbage collector, which warns as it closes it.
UNCLOSED = r"ignore:unclosed <socket\.socket .*laddr=\('127\.0\.0\.1':ResourceWarning"


def has_oldest_pyspark() -> bool:
    """Whether these are the tests of ``make test-oldest``."""
    try:
        return importlib.metadata.version("pyspark").startswith("4.1.")
    except importlib.metadata.PackageNotFoundError:
        return False


def pytest_configure(config: pytest.Config) -> None:
    """Choose the number of examples; allow what an old PySpark does and a newer one does not."""
    if "property" in config.option.markexpr:
        settings.load_profile("many")
    if has_oldest_pyspark():
        config.addinivalue_line("filterwarnings", UNCLOSED)


SYSTEM = ROOT / "tests" / "system"
SERVERS = {"hdfs", "kafka", "kafka_server", "s3"}
SLOW_SECONDS = 30.0
"""How long a file takes that is marked ``slow`` without a number."""


@pytest.hookimpl(tryfirst=True)  # before -m is applied
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of ``make test-system``, and start the files that take longest first.

    Started last, those would keep one process busy alone. ``slow(seconds)`` tells how long. Tests
    for the oldest PySpark are left out with any other.
    """
    if not has_oldest_pyspark():
        others = [item for item in items if item.get_closest_marker("oldest")]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if not item.get_closest_marker("oldest")]
    seconds: dict[Path, float] = {}
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        if item.path.is_relative_to(SYSTEM) or SERVERS & fixtures:
            item.add_marker("system")
        if getattr(item, "cls", None) is None and is_hypothesis_test(getattr(item, "obj", None)):
            item.add_marker("property")
        if "spark" in fixtures and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SPARK_SECONDS))
        if slow := item.get_closest_marker("slow"):
            own = float(slow.args[0]) if slow.args else SLOW_SECONDS
            seconds[item.path] = max(own, seconds.get(item.path, 0.0))
    items.sort(key=lambda item: seconds.get(item.path, 0.0), reverse=True)


def pytest_collection_finish() -> None:
    """Tests live to the end: the garbage collector need not look at them again and again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Have all freed at the end of the process: DuckDB reports what is not."""
    gc.unfreeze()


# A test that is interrupted in a call of the JVM spoils the session for all tests after it.
SPARK_SECONDS = 900.0

# Time for threads that were told to stop, and are on their way out, to get there.
GRACE_SECONDS = 60.0


@pytest.fixture(params=["sqlite", "postgresql"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """A place for an empty store, once with each backend; what is opened there is closed."""
    from tests.kit.stores import Backend, backend_url  # not all tests need what it imports

    place = Backend(backend_url(request.param, request))
    yield place
    place.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """The same without a table: the first that opens the store creates it."""
    from tests.kit.stores import Backend, backend_url

    place = Backend(backend_url(request.param, request, tables=False))
    yield place
    place.close()


@pytest.fixture(autouse=True)
def no_leaked_threads() -> Iterator[None]:
    """Fail a test that leaves a thread running, and show where that thread is.

    Being autouse, it is set up before the test's own fixtures and torn down after them: a fixture
    may well stop its threads in its teardown.
    """
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + GRACE_SECONDS
    leaked = [
        thread
        for thread in threading.enumerate()
        if thread not in before and not may_last(thread) and not _ends_by(thread, deadline)
    ]
    if leaked:
        pytest.fail(
            "the test left threads running:\n" + "\n".join(_describe(thread) for thread in leaked),
            pytrace=False,
        )


def _ends_by(thread: threading.Thread, deadline: float) -> bool:
    # C code that calls into Python gets a dummy thread: not started here, and not to be joined.
    if isinstance(thread, threading._DummyThread) or _is_py4j(thread):
        return True
    thread.join(max(0.0, deadline - time.monotonic()))
    return not thread.is_alive()


def _is_py4j(thread: threading.Thread) -> bool:
    # One for each connection on which the JVM calls into Python. The JVM keeps it for later.
    owner = getattr(getattr(thread, "_target", None), "__self__", None)
    return type(owner).__module__.startswith("py4j.")


def _describe(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    stack = "".join(traceback.format_stack(frame)) if frame else "  (no Python frame)\n"
    return f"{thread!r}, now at:\n{stack}"
