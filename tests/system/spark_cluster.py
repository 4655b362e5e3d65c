"""A standalone Spark cluster on the loopback, from the pyspark that is installed."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.kit.jvm import QUICK
from tests.kit.processes import Life, free_port
from tests.kit.threads import until

EXECUTOR = "CoarseGrainedExecutorBackend"
WORKERS = 2


class Cluster:
    """A master and two workers of one core and 1 GiB each, all in processes of their own.

    They know nothing of the environment that the tests run in: no PYTHONPATH, no batchmill.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
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
        try:
            port, page = str(self._port), str(self._page)
            self._start("master", "master.Master", "--port", port, "--webui-port", page)
            for number in range(WORKERS):
                options = ("--cores", "1", "--memory", "1g", "--webui-port", "0")
                folder = ("--work-dir", str(self.work_folder(number)))
                self._start(f"worker-{number}", "worker.Worker", *options, *folder, self.url)
            self.wait_until(lambda: self.alive() == WORKERS, "the workers have come")
        except BaseException:
            self.stop()
            raise
        return self

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
        listed = subprocess.run(
            ["ps", "-A", "-ww", "-o", "pid=,ppid=,args="],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        processes = (line.split(maxsplit=2) for line in listed.splitlines())
        parent = str(self.workers[number].pid)
        return [
            int(pid) for pid, ppid, *args in processes if ppid == parent and EXECUTOR in str(args)
        ]

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
