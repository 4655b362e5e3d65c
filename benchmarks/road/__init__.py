"""The whole path of spans: its cost, a flood, a backlog: ``python -m benchmarks.road``."""
