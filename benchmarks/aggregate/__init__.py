"""Aggregation in the process beside its peers: ``python -m benchmarks.aggregate``."""
