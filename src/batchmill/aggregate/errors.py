"""Errors of aggregation."""

from __future__ import annotations

from batchmill.errors import BatchmillError


class DeltasError(BatchmillError):
    """Deltas that were made for other metrics, or by another version, cannot be merged here."""

    def __init__(self, source: str, reason: str) -> None:
        self.source = source
        self.reason = reason
        super().__init__(
            f"deltas of {source} were made for other metrics than these: {reason}; "
            "give the process that made them the same script and settings"
        )
