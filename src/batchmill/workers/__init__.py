"""L1, L2 and TopN in one process: events through batch queues into a store, without Spark.

:class:`Embedded` is all of it, for an application. Its parts are for wiring by hand:
:class:`L1Worker`, :class:`L2Worker` and :class:`TopNWorker` are handlers for queues made with
:mod:`batchmill.presets`; a :class:`Committer` writes to the store. Loads without its extra,
``aggregate``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchmill.aggregate import Statement
from batchmill.extras import lazy_names
from batchmill.workers.settings import WorkerSettings
from batchmill.workers.stats import EmbeddedStats

if TYPE_CHECKING:
    from batchmill.workers.embedded import Embedded, exit_on_sigterm
    from batchmill.workers.l1 import L1Worker, SourceStates
    from batchmill.workers.l2 import CommitStats, Committer, L2Worker
    from batchmill.workers.topn import TopNWorker

__all__ = [
    "CommitStats",
    "Committer",
    "Embedded",
    "EmbeddedStats",
    "L1Worker",
    "L2Worker",
    "SourceStates",
    "Statement",
    "TopNWorker",
    "WorkerSettings",
    "exit_on_sigterm",
]

_MODULES = {
    "embedded": "Embedded exit_on_sigterm",
    "l1": "L1Worker SourceStates",
    "l2": "CommitStats Committer L2Worker",
    "topn": "TopNWorker",
}

__getattr__ = lazy_names(__name__, _MODULES, feature="batchmill.workers", extra="aggregate")
