"""Prometheus remote write."""
