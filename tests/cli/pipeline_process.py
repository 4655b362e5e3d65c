"""``batchmill`` commands in a process of their own, one after the other on one Spark session.

``python -m tests.cli.pipeline_process`` prints ``ready`` and reads lines with a JSON list of
arguments from its standard input. It runs that command, and prints ``exit CODE`` after the
command's output. Before each commit it prints ``commit N begin``.
"""

from __future__ import annotations

import json
import sys
from typing import Any
from unittest import mock

from batchmill.cli import main
from batchmill.spark import build_session
from batchmill.store import Batch, CommitResult, Store
from tests.kit.pipeline_driver import say
from tests.kit.pipelines import QUICK_SPARK


def run() -> None:
    """Run what is asked for until nothing more is."""
    session = build_session("local[2]", conf=QUICK_SPARK)
    commit: Any = Store.commit

    def marked(self: Store, batch: Batch) -> CommitResult:
        say(f"commit {batch.number} begin")
        result: CommitResult = commit(self, batch)
        return result

    say("ready")
    with mock.patch.object(Store, "commit", marked):
        for line in sys.stdin:
            sys.argv = ["batchmill", *json.loads(line)]
            say(f"exit {main()}")
    session.stop()


if __name__ == "__main__":
    run()
