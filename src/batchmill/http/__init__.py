"""HTTP serving that ingest, web and the Prometheus page share: access, connections, TLS."""

from batchmill.http.access import Access, is_loopback

__all__ = ["Access", "is_loopback"]
