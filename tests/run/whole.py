"""``batchmill run`` with the stand-in for its pipeline: ``python -m tests.run.whole [slow] …``.

All else is as it is: ingest, the demo's traffic, the supervisor, the view.
"""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

from batchmill.cli import main
from batchmill.cli import run as command
from batchmill.cli.config import Settings
from batchmill.run.home import Home
from batchmill.run.specs import READY
from batchmill.run.supervisor import Spec


def run(*words: str) -> int:
    """Run the command that is left in ``sys.argv``."""

    def stand_in(settings: Settings, home: Home) -> Spec:
        return Spec(
            name="pipeline",
            target=str(Path(__file__).with_name("stand_in.py")),
            arguments=[str(home.folder), *words],
            ready_line=READY,
        )

    with (
        mock.patch.object(command, "pipeline_spec", stand_in),
        mock.patch.object(command, "check"),
    ):
        return main()


if __name__ == "__main__":
    given = sys.argv[1:]
    words = [given.pop(0)] if given[0] == "slow" else []
    sys.argv = ["batchmill", "run", "--http-port=0", "--grpc-port=0", "--web-port=0", *given]
    sys.exit(run(*words))
