"""Queries of the overview beside DuckDB: ``python -m benchmarks.query``."""
