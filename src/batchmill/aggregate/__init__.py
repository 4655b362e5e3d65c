"""Aggregates rows to mergeable states: one kernel for the in-process workers and for Spark.

:class:`Aggregator` makes :class:`Deltas` of the rows of one event type, merges them, and rolls them
up to hours and days; :func:`contribution` turns them into what a store commits.
:class:`SlowestStatements` keeps the slowest calls of databases and caches. NumPy and Arrow, no
Spark and no database. Loads without its extra, ``aggregate``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchmill.aggregate.errors import DeltasError
from batchmill.aggregate.overflow import (
    OVERFLOW,
    EntityAccount,
    EntityBudget,
    EntityLimiter,
    Offender,
    Overflow,
    UnknownEntities,
    worst,
)
from batchmill.aggregate.plan import (
    DEFAULT_APDEX_MS,
    LARGEST_DOUBLE,
    MOST_MS,
    SourcePlan,
    TallyColumn,
    Total,
)
from batchmill.aggregate.settings import AggregationSettings
from batchmill.aggregate.topn import (
    CACHE_READ,
    CACHE_WRITE,
    DATABASE,
    NORMALISED,
    SERVICE_DATABASE,
    SlowestStatements,
    SlowThresholds,
    Statement,
    TopNThresholds,
    entity_number,
    normalise,
)
from batchmill.extras import lazy_names

if TYPE_CHECKING:
    from batchmill.aggregate.aggregator import AggregationResult, Aggregator
    from batchmill.aggregate.cells import Contribution, EntityBook, contribution, rows_by_minute
    from batchmill.aggregate.columns import Column, Runs, Tallies
    from batchmill.aggregate.deltas import ROW_COUNT, Deltas, from_arrow, is_deltas, to_arrow
    from batchmill.aggregate.rows import read_whole
    from batchmill.aggregate.statement_table import (
        STATEMENT_SOURCE,
        is_statements,
        statements_from_arrow,
        statements_to_arrow,
    )
    from batchmill.aggregate.validity import (
        TIMESTAMP,
        Reasons,
        is_readable,
        row_checks,
        timestamps,
    )

__all__ = [
    "CACHE_READ",
    "CACHE_WRITE",
    "DATABASE",
    "DEFAULT_APDEX_MS",
    "LARGEST_DOUBLE",
    "MOST_MS",
    "NORMALISED",
    "OVERFLOW",
    "SERVICE_DATABASE",
    "STATEMENT_SOURCE",
    "TIMESTAMP",
    "AggregationSettings",
    "Aggregator",
    "Column",
    "Contribution",
    "Deltas",
    "DeltasError",
    "EntityAccount",
    "EntityBook",
    "EntityBudget",
    "EntityLimiter",
    "AggregationResult",
    "Offender",
    "Overflow",
    "ROW_COUNT",
    "Reasons",
    "Runs",
    "SlowThresholds",
    "SlowestStatements",
    "SourcePlan",
    "Statement",
    "Tallies",
    "TallyColumn",
    "TopNThresholds",
    "Total",
    "UnknownEntities",
    "contribution",
    "entity_number",
    "from_arrow",
    "is_deltas",
    "is_readable",
    "is_statements",
    "normalise",
    "read_whole",
    "row_checks",
    "rows_by_minute",
    "statements_from_arrow",
    "statements_to_arrow",
    "timestamps",
    "to_arrow",
    "worst",
]

_MODULES = {
    "aggregator": "Aggregator AggregationResult",
    "cells": "Contribution EntityBook contribution rows_by_minute",
    "columns": "Column Runs Tallies",
    "deltas": "ROW_COUNT Deltas from_arrow is_deltas to_arrow",
    "rows": "read_whole",
    "statement_table": "STATEMENT_SOURCE is_statements statements_from_arrow statements_to_arrow",
    "validity": "TIMESTAMP Reasons is_readable row_checks timestamps",
}

__getattr__ = lazy_names(__name__, _MODULES, feature="aggregation", extra="aggregate")
