"""The page that Prometheus scrapes."""
