"""Groups, executors and databases: ``python -m benchmarks.scale``."""
