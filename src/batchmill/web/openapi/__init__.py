"""The OpenAPI document of the JSON API."""

from batchmill.web.openapi.paths import document

__all__ = ["document"]
