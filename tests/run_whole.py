"""``batchmill run`` with the stand-in for its pipeline: ``python -m tests.run_whole [slow] …``.

All else is as it is: ingest, the demo's traffic, the supervisor, the view.
"""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

from batchmill.cli import _run, main
from batchmill.cli._config import Settings
from batchmill.cli._run_home import Home
from batchmill.cli._run_specs import READY
from batchmill.cli._supervise import Spec


def run(*words: str) -> int:
    """Run the command that is left in ``sys.argv``."""

    def stand_in(settings: Settings, home: Home) -> Spec:
        return Spec(
            name="pipeline",
            target=str(Path(__file__).with_name("run_stand_in.py")),
            arguments=[str(home.folder), *words],
            ready_line=READY,
        )

    with mock.patch.object(_run, "pipeline_spec", stand_in), mock.patch.object(_run, "check"):
        return main()


if __name__ == "__main__":
    given = sys.argv[1:]
    words = [given.pop(0)] if given[0] == "slow" else []
    sys.argv = ["batchmill", "run", "--http-port=0", "--grpc-port=0", "--web-port=0", *given]
    sys.exit(run(*words))
