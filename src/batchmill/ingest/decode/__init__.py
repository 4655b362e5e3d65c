"""OTLP requests to columns of spans."""
