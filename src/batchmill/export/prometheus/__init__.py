"""The page that Prometheus scrapes, and the series that it shows."""
