"""Aggregates rows to mergeable states: one kernel for the in-process workers and for Spark.

:class:`Aggregator` makes :class:`Deltas` of the rows of one event type, merges them, and rolls them
up to hours and days; :func:`contribution` turns them into what a store commits. NumPy and Arrow, no
Spark and no database: needs the extra ``aggregate``.
"""

from batchmill.aggregate.aggregator import Aggregator, Made
from batchmill.aggregate.cells import Contribution, EntityBook, contribution
from batchmill.aggregate.deltas import Deltas, from_arrow, is_deltas, to_arrow
from batchmill.aggregate.errors import DeltasError
from batchmill.aggregate.plan import SourcePlan

__all__ = [
    "Aggregator",
    "Contribution",
    "Deltas",
    "DeltasError",
    "EntityBook",
    "Made",
    "SourcePlan",
    "contribution",
    "from_arrow",
    "is_deltas",
    "to_arrow",
]
