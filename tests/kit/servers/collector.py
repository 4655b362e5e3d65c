"""A real OpenTelemetry Collector for tests, which ``scripts/collector.sh`` has built."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.kit.files import ROOT
from tests.kit.processes import Life

SCRIPT = ROOT / "scripts" / "collector.sh"
MISSING = f"no OpenTelemetry Collector: {SCRIPT.relative_to(ROOT)} builds one, once, with Go"


@functools.cache
def collector_program() -> str:
    """The program; without it the test is skipped, or fails in CI."""
    there = subprocess.run(
        [SCRIPT, "--there"], capture_output=True, text=True, timeout=60, check=False
    )
    if there.returncode:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(MISSING)
    return there.stdout.strip()


@contextlib.contextmanager
def running_collector(config: Path, log: Path, env: Mapping[str, str]) -> Iterator[Life]:
    """A Collector with this configuration, killed at the end; ``log`` has what it said."""
    command = [collector_program(), "--config", str(config)]
    with Life(command, log, {**os.environ, **env}) as process:
        yield process
