"""Kafka in the place of the spool: ``python -m benchmarks.kafka``."""
