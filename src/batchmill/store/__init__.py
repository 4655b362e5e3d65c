"""Where metrics are kept: SQLite or PostgreSQL, behind one protocol.

Loads with the standard library alone; PostgreSQL takes the extra ``postgres``.
"""

from batchmill.store._cells import Cell, cells, decode
from batchmill.store._checkpoint import Exempt
from batchmill.store._errors import (
    BatchGapError,
    CheckpointMismatchError,
    FencedError,
    LayoutChangedError,
    MetricConflictError,
    MissingDriverError,
    NamesClashError,
    NotAStoreError,
    StaleCarryError,
    StoreClosedError,
    StoreError,
    StoreFullError,
    StoreInUseError,
    StoreMissingError,
    StoreReadOnlyError,
    StoreRefusedError,
    StoreUnavailableError,
    StoreVersionError,
    TooManyColumnsError,
)
from batchmill.store._open import open_store
from batchmill.store._protocol import Store
from batchmill.store._retry import RetryPolicy
from batchmill.store._tally import encode_label_sums, encode_labels, encode_numbers
from batchmill.store._types import (
    EXPIRED,
    TOO_OLD,
    Batch,
    Carry,
    Claim,
    CommitResult,
    Deltas,
    EntityRow,
    Layout,
    StatementRow,
    TopNRow,
)
from batchmill.store._views import (
    StateRow,
    StoredEntity,
    StoredMetric,
    StreamInfo,
    TopRecord,
    Value,
)

__all__ = [
    "Batch",
    "BatchGapError",
    "Carry",
    "Cell",
    "CheckpointMismatchError",
    "Claim",
    "CommitResult",
    "Deltas",
    "EXPIRED",
    "EntityRow",
    "Exempt",
    "FencedError",
    "Layout",
    "LayoutChangedError",
    "MetricConflictError",
    "MissingDriverError",
    "NamesClashError",
    "NotAStoreError",
    "RetryPolicy",
    "StaleCarryError",
    "StateRow",
    "StatementRow",
    "Store",
    "StoreClosedError",
    "StoreError",
    "StoreFullError",
    "StoreInUseError",
    "StoreMissingError",
    "StoreReadOnlyError",
    "StoreRefusedError",
    "StoreUnavailableError",
    "StoreVersionError",
    "StoredEntity",
    "StoredMetric",
    "StreamInfo",
    "TOO_OLD",
    "TooManyColumnsError",
    "TopNRow",
    "TopRecord",
    "Value",
    "cells",
    "decode",
    "encode_label_sums",
    "encode_labels",
    "encode_numbers",
    "open_store",
]
