"""Errors of exporters and of the page for Prometheus."""

from __future__ import annotations

from batchmill.errors import BatchmillError


class ExporterInUseError(BatchmillError, RuntimeError):
    """Another process runs an exporter of that name."""

    name: str
    folder: str
    template = (
        "an exporter named {name!r} runs on {folder} already: stop that one first, "
        "or give this one a --name of its own"
    )


class SendError(BatchmillError, OSError):
    """A peer did not take what was sent."""

    reason: str
    """In a word or two; it is counted by."""
    detail: str = ""
    retry: bool = True
    """Whether the same may be taken later; False: it is what was sent that is wrong."""
    too_large: bool = False
    """Whether less at a time may be taken."""
    after_s: float | None = None
    """When the peer wants to be asked again; None: it did not say."""

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}" if self.detail else self.reason


class StoreUnreadableError(BatchmillError, ConnectionError):
    """There is no page for Prometheus, because the store cannot be read."""

    why: str
    template = "the store cannot be read: {why}"
