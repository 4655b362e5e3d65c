"""The outbox: what each commit changed, as files that exporters read.

A batch's changes are written to a file before its commit, and the commit names the file: so a
process that is killed loses no export, and nobody who commits waits for a peer of an exporter.

Loads without pyarrow, so that it can say which extra is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    try:
        return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("batchmill"):
            raise
        raise MissingOutboxError(f"{error.name} is not installed") from error
