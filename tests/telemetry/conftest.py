"""Tests of telemetry begin with a registry that has counted nothing."""

from __future__ import annotations

import pytest

from batchmill.telemetry import default_registry


@pytest.fixture(autouse=True)
def nothing_counted() -> None:
    """Forget the totals and names of what tests before this one had in the process's registry."""
    default_registry.after_fork_in_child()
