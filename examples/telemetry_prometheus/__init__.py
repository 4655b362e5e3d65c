"""A service whose queues a Prometheus scrapes: `python -m examples.telemetry_prometheus`."""
