"""Benchmarks: batchmill and named peers, measured on the same work in the same run."""

from __future__ import annotations

from pathlib import Path

RESULTS = Path(__file__).parent / "results"
"""Where the results that the documentation quotes are kept."""
