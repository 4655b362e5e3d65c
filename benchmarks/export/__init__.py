"""What an outbox for exporters costs a batch: ``python -m benchmarks.export``."""
