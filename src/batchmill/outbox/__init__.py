"""The outbox: what each commit changed, as files that exporters read.

A batch's changes are written to a file before its commit, and the commit names the file: so a
process that is killed loses no export, and nobody who commits waits for a peer of an exporter.

Loads without pyarrow, so that it can say which extra is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchmill._lazy import lazy_names
from batchmill.outbox._errors import MissingOutboxError, NoOutboxError, OutboxFileError
from batchmill.outbox._settings import OutboxSettings

if TYPE_CHECKING:
    from batchmill.outbox._file import Changes, LayoutEntry
    from batchmill.outbox._folder import Outbox

__all__ = [
    "Changes",
    "LayoutEntry",
    "MissingOutboxError",
    "NoOutboxError",
    "Outbox",
    "OutboxFileError",
    "OutboxSettings",
]

_MODULES = {"Changes": "_file", "LayoutEntry": "_file", "Outbox": "_folder"}

__getattr__ = lazy_names(__name__, _MODULES, MissingOutboxError)
