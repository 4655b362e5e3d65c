"""The outbox: what each commit changed, as files that exporters read.

A batch's changes are written to a file before its commit, and the commit names the file: so a
process that is killed loses no export, and nobody who commits waits for a peer of an exporter.

Loads without pyarrow, so that it can say which extra is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchmill.extras import lazy_names
from batchmill.outbox.errors import NoOutboxError, OutboxFileError
from batchmill.outbox.settings import OutboxSettings

if TYPE_CHECKING:
    from batchmill.outbox.file import Changes, LayoutEntry
    from batchmill.outbox.folder import Outbox

__all__ = [
    "Changes",
    "LayoutEntry",
    "NoOutboxError",
    "Outbox",
    "OutboxFileError",
    "OutboxSettings",
]

_MODULES = {"Changes": "file", "LayoutEntry": "file", "Outbox": "folder"}

__getattr__ = lazy_names(__name__, _MODULES, feature="the outbox", extra="export")
