"""Errors of a request, with their HTTP status."""

from __future__ import annotations

from collections.abc import Mapping


class RequestError(Exception):
    """A request that gets an error response; has ``status`` and ``reason``."""

    status = 400

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers of the error response."""
        return {}


class BadRequest(RequestError):
    """A parameter is not valid, or the result would be too large."""


class NotFound(RequestError):
    """The requested object does not exist."""

    status = 404


class Unavailable(RequestError):
    """The server cannot handle the request now; has ``retry_after_s``."""

    status = 503

    def __init__(self, reason: str, retry_after_s: int = 5) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> Mapping[str, str]:
        """``Retry-After``."""
        return {"Retry-After": str(self.retry_after_s)}
