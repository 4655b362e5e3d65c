"""The receivers, and the path from a sender to the store: ``python -m benchmarks.ingest``."""
