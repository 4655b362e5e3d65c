"""Errors of aggregation."""

from __future__ import annotations

from batchmill.errors import BatchmillError


class DeltasError(BatchmillError, ValueError):
    """Deltas that were made for other metrics, or by another version, cannot be merged here."""

    source: str
    """The event type."""
    reason: str
    template = (
        "deltas of {source} cannot be merged here: {reason}; "
        "give the process that made them the same version, script and settings"
    )
