"""What goes wrong with a question, and what its answer says then."""

from __future__ import annotations

from collections.abc import Mapping


class Refused(Exception):
    """A question that is answered with an error; carries ``status`` and ``reason``."""

    status = 400

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    @property
    def headers(self) -> Mapping[str, str]:
        """What the answer says beside."""
        return {}


class BadQuestion(Refused):
    """A parameter is wrong, or too much is asked for."""


class NotFound(Refused):
    """There is no such thing."""

    status = 404


class Unavailable(Refused):
    """There is no answer at this moment; carries ``retry_after_s``."""

    status = 503

    def __init__(self, reason: str, retry_after_s: int = 5) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> Mapping[str, str]:
        """When to ask again."""
        return {"Retry-After": str(self.retry_after_s)}
