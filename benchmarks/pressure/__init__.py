"""Thresholds and the micro-batcher beside their peers: ``python -m benchmarks.pressure``."""
