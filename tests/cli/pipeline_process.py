"""``batchmill`` commands in a process of their own, one after the other on one Spark session.

``python -m tests.cli.pipeline_process`` prints ``ready`` and reads lines with a JSON list of
arguments from its standard input. It runs that command, and prints ``exit CODE`` after the
command's output. If the list begins with ``hold``, the first commit prints ``commit N begin`` and
waits for another line.
"""

from __future__ import annotations

import json
import sys
from typing import Any
from unittest import mock

from batchmill.cli import main
from batchmill.store import Batch, CommitResult, Store
from tests.kit.pipeline_driver import lease_session, say
from tests.kit.pipelines import QUICK_SPARK


def run() -> None:
    """Run the commands that standard input names, until it ends."""
    session = lease_session(QUICK_SPARK)
    commit: Any = Store.commit
    holds: list[str] = []

    def marked(self: Store, batch: Batch) -> CommitResult:
        if holds:
            holds.clear()
            say(f"commit {batch.number} begin")
            sys.stdin.readline()
        result: CommitResult = commit(self, batch)
        return result

    say("ready")
    with mock.patch.object(Store, "commit", marked):
        while line := sys.stdin.readline():
            arguments = json.loads(line)
            if arguments[0] == "hold":
                holds.append(arguments.pop(0))
            sys.argv = ["batchmill", *arguments]
            say(f"exit {main()}")
    session.release()


if __name__ == "__main__":
    run()
