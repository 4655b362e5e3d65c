"""``batchmill run`` with a fake pipeline: ``python -m tests.run.run_process [slow] OPTION…``.

Everything else is real: ingest, the demo's traffic, the supervisor, the display.
"""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

from batchmill.cli import main
from batchmill.run import Home, RunSettings, runner
from batchmill.run.specs import READY
from batchmill.run.supervisor import Spec


def run(*words: str) -> int:
    """Run the command that is left in ``sys.argv``."""

    def fake_pipeline(settings: RunSettings, home: Home) -> Spec:
        return Spec(
            name="pipeline",
            target=str(Path(__file__).with_name("fake_pipeline.py")),
            arguments=[str(home.folder), *words],
            ready_line=READY,
        )

    with (
        mock.patch.object(runner, "pipeline_spec", fake_pipeline),
        mock.patch("batchmill.cli.run.check_run"),
    ):
        return main()


if __name__ == "__main__":
    given = sys.argv[1:]
    words = [given.pop(0)] if given[0] == "slow" else []
    sys.argv = ["batchmill", "run", "--http-port=0", "--grpc-port=0", "--web-port=0", *given]
    sys.exit(run(*words))
