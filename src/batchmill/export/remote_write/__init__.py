"""Prometheus remote write: the complete minutes of a store, sent to a receiver."""
