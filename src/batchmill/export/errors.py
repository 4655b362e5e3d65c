"""What can go wrong on the way to a peer."""

from __future__ import annotations

from batchmill.errors import BatchmillError


class ExporterInUseError(BatchmillError, RuntimeError):
    """Another process runs an exporter of that name; carries ``name`` and ``folder``."""

    def __init__(self, name: str, folder: str) -> None:
        super().__init__(name, folder)
        self.name = name
        self.folder = folder

    def __str__(self) -> str:
        return (
            f"an exporter named {self.name!r} runs on {self.folder} already: stop that one first, "
            "or give this one a --name of its own"
        )


class SendError(BatchmillError, OSError):
    """A peer did not take what was sent; carries ``reason``, ``detail`` and what to do about it."""

    def __init__(
        self,
        reason: str,
        detail: str = "",
        *,
        retry: bool = True,
        too_large: bool = False,
        after_s: float | None = None,
    ) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        """In a word or two; it is counted by."""
        self.detail = detail
        self.retry = retry
        """Whether the same may be taken later; False: it is what was sent that is wrong."""
        self.too_large = too_large
        """Whether less at a time may be taken."""
        self.after_s = after_s
        """When the peer wants to be asked again; None: it did not say."""

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}" if self.detail else self.reason

    def __reduce__(self) -> tuple[object, ...]:
        return _again, (self.reason, self.detail, self.retry, self.too_large, self.after_s)


def _again(
    reason: str, detail: str, retry: bool, too_large: bool, after_s: float | None
) -> SendError:
    return SendError(reason, detail, retry=retry, too_large=too_large, after_s=after_s)


class StoreUnreadableError(BatchmillError, ConnectionError):
    """There is no page for Prometheus, because the store cannot be read; carries ``why``."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why

    def __str__(self) -> str:
        return f"the store cannot be read: {self.why}"
