"""The outbox: what each commit changed, as files that exporters read.

A batch's changes are written to a file before its commit, and the commit lists the file: a process
that is killed loses no export, and a commit never waits for an exporter or its receiver.

Loads without pyarrow, so that it can say which extra is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchmill.extras import lazy_names
from batchmill.outbox.settings import NoOutboxError, OutboxFileError, OutboxSettings

if TYPE_CHECKING:
    from batchmill.outbox.outbox import Changes, LayoutEntry, Outbox

__all__ = [
    "Changes",
    "LayoutEntry",
    "NoOutboxError",
    "Outbox",
    "OutboxFileError",
    "OutboxSettings",
]

_MODULES = {"outbox": "Changes LayoutEntry Outbox"}

__getattr__ = lazy_names(__name__, _MODULES, feature="the outbox", extra="export")
