"""A standalone Spark cluster on the loopback, from the pyspark that is installed."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from tests.kit.jvm import QUICK, jvm_options
from tests.kit.pipeline_driver import SPAN_WAIT_S
from tests.kit.pipelines import MIXED_OAL, QUICK_SPARK
from tests.kit.processes import Life, free_port
from tests.kit.threads import until

EXECUTOR = "CoarseGrainedExecutorBackend"
DAEMON = "pyspark.daemon"
WORKERS = 2
CONF = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.executor.memory": "512m",
    "spark.executor.extraJavaOptions": " ".join(QUICK),
    **QUICK_SPARK,
}
_HIDE = 'mount -t tmpfs none "$0" && exec "$@"'


class Cluster:
    """A master and workers of one core and 1 GiB each, all in processes of their own.

    They know nothing of the environment that the tests run in: no PYTHONPATH, no batchmill. With
    ``hidden``, an empty folder is in the place of that one for workers and their executors.
    """

    def __init__(self, folder: Path, hidden: Path | None = None, *, workers: int = WORKERS) -> None:
        self._folder = folder
        self._hidden = hidden
        self._count = workers
        self._port, self._page = free_port(), free_port()
        self._lives: list[Life] = []

    @property
    def url(self) -> str:
        """The master's address."""
        return f"spark://127.0.0.1:{self._port}"

    @property
    def workers(self) -> list[Life]:
        """The workers; what a worker's executors do in the end is in its folder."""
        return self._lives[1:]

    def work_folder(self, number: int) -> Path:
        """Where the executors of a worker have their own folders."""
        return self._folder / f"work-{number}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def start(self) -> None:
        """Start everything, and wait until the master has all workers."""
        self._lives.clear()
        try:
            port, page = str(self._port), str(self._page)
            self._start("master", "master.Master", "--port", port, "--webui-port", page)
            for number in range(self._count):
                options = ("--cores", "1", "--memory", "1g", "--webui-port", "0")
                folder = ("--work-dir", str(self.work_folder(number)))
                self._start(f"worker-{number}", "worker.Worker", *options, *folder, self.url)
            self.wait_until(lambda: self.alive() == self._count, "the workers have come")
        except BaseException:
            self.stop()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End everything that is left of it, executors included."""
        for life in reversed(self._lives):
            life.kill()

    def facts(self) -> Mapping[str, Any]:
        """What the master's page says."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._page}/json/", timeout=30) as page:
            facts: dict[str, Any] = json.load(page)
            return facts

    def alive(self) -> int:
        """How many workers the master counts as alive; 0 as long as it does not answer."""
        try:
            return sum(worker["state"] == "ALIVE" for worker in self.facts()["workers"])
        except (OSError, ValueError):  # its first pages are none of JSON
            return 0

    def executors(self, number: int) -> list[int]:
        """The processes that a worker's executors are."""
        return _children([self.workers[number].pid], EXECUTOR)

    def python_workers(self) -> list[int]:
        """The Python processes of all executors, and those that fork them."""
        executors = [pid for number in range(WORKERS) for pid in self.executors(number)]
        daemons = _children(executors, DAEMON)
        return [*daemons, *_children(daemons, DAEMON)]

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a state of the cluster; the error has the last output of all its processes."""
        until(condition, lambda: "\n".join([what, *(life.report() for life in self._lives)]))

    def _start(self, name: str, kind: str, *options: str) -> None:
        import pyspark

        home = Path(pyspark.__file__).parent
        known = {
            variable: os.environ[variable]
            for variable in ("PATH", "JAVA_HOME", "HOME")
            if variable in os.environ
        }
        command = [str(home / "bin" / "spark-class"), f"org.apache.spark.deploy.{kind}"]
        if self._hidden is not None and kind == "worker.Worker":
            command = [*_unshare(), "sh", "-c", _HIDE, str(self._hidden), *command]
        life = Life(
            [*command, "--host", "127.0.0.1", *options],
            self._folder / f"{name}.log",
            {
                **known,
                "SPARK_HOME": str(home),
                "SPARK_NO_DAEMONIZE": "1",
                "SPARK_LOCAL_IP": "127.0.0.1",
                "SPARK_DAEMON_MEMORY": "512m",
                "SPARK_DAEMON_JAVA_OPTS": " ".join(QUICK),
            },
        )
        self._lives.append(life)


def need_hiding() -> None:
    """Skip the test where folders cannot be hidden from processes, and fail it in CI.

    They can be hidden as root, or in a user namespace.
    """
    command = [*_unshare(), "sh", "-c", _HIDE, "/mnt", "true"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        fault = done.stderr.strip() or f"exit code {done.returncode}" if done.returncode else None
    except FileNotFoundError as error:
        fault = str(error)
    if fault is not None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(
            f"folders cannot be hidden from processes, with unshare --mount: {fault}"
        )


def _unshare() -> list[str]:
    return ["unshare", "--mount", *([] if os.getuid() == 0 else ["--map-root-user"])]


@contextlib.contextmanager
def driver(
    cluster: Cluster,
    folder: Path,
    url: str,
    conf: Mapping[str, str] | None = None,
    **given: Any,
) -> Iterator[Life]:
    """The pipeline as a user runs it, one segment a batch; ``given`` are other options.

    ``conf`` has more settings of Spark.
    """
    script = folder / "metrics.oal"
    script.write_text(MIXED_OAL)
    places = {"oal": script, "spool": folder / "spool", "checkpoint": folder / "checkpoint"}
    options = {**places, "store": url, "master": cluster.url, "batch-files": 1, "ttl-days": 365}
    options |= {"span-wait": int(SPAN_WAIT_S), **given}
    command = [sys.executable, "-m", "batchmill", "pipeline", "--once"]
    command += [f"--{name}={value}" for name, value in options.items()]
    command += [f"--conf={key}={value}" for key, value in {**CONF, **(conf or {})}.items()]
    life = Life(command, folder / "driver.log", driver_environment())
    try:
        yield life
    finally:
        life.kill()


def driver_environment() -> dict[str, str]:
    """The environment of a driver that starts quickly."""
    return {**os.environ, "SPARK_SUBMIT_OPTS": jvm_options(), "SPARK_LOCAL_IP": "127.0.0.1"}


def _children(parents: Sequence[int], command: str) -> list[int]:
    """The children of some processes whose command line has that in it."""
    listed = subprocess.run(
        ["ps", "-A", "-ww", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True
    ).stdout
    processes = (line.split(maxsplit=2) for line in listed.splitlines())
    return [
        int(pid) for pid, ppid, *args in processes if int(ppid) in parents and command in str(args)
    ]
