"""The ``batchmill`` command itself: its version, and what it says when its extra is missing."""

from __future__ import annotations

import subprocess
import sys

import batchmill
from tests.kit.threads import PATIENCE_S

WITHOUT_RICH = """
import sys
sys.modules["rich"] = None
sys.argv = ["batchmill", "top"]
from batchmill.cli import main
sys.exit(main())
"""


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run this Python to its end with its output in pipes."""
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def test_version_is_the_package_s() -> None:
    """`batchmill --version` prints the version of the package."""
    assert python("-m", "batchmill", "--version").stdout == f"batchmill {batchmill.__version__}\n"


def test_missing_rich_is_named() -> None:
    """A command that draws with rich fails without it and says what to install: no traceback."""
    done = python("-c", WITHOUT_RICH)
    assert done.returncode == 1
    assert "pip install 'batchmill[cli]'" in done.stderr
    assert "Traceback" not in done.stderr
