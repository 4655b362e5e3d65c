"""The queue beside its peers: ``python -m benchmarks.queue``."""
