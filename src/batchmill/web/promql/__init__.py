"""The HTTP API of Prometheus, for Grafana."""
