"""Kept spans: queries beside DuckDB, and their cost: ``python -m benchmarks.traces``."""
