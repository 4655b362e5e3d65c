"""An exporter that nobody runs any more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchmill.export.lock import only_one
from batchmill.store import Store

if TYPE_CHECKING:
    from batchmill.outbox import Outbox


def forget_exporter(store: Store, outbox: Outbox, name: str) -> None:
    """Let nothing wait for an exporter any more; what it has not sent is counted.

    Raises :class:`ExporterInUseError` while it runs: it would end with an error, and what it has in
    hand would be counted as dropped.
    """
    with only_one(outbox.folder, name):
        outbox.remove(store.leave_outbox(name, outbox.place))
