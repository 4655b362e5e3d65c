"""The metrics pipeline on Apache Spark.

Loads without pyspark, so that it can say which extra is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchmill._lazy import lazy_names
from batchmill.spark._errors import MissingSparkError, PipelineError

if TYPE_CHECKING:
    from batchmill.spark._batch import BatchStats
    from batchmill.spark._engine import BatchReport
    from batchmill.spark._java import find_java
    from batchmill.spark._pipeline import Pipeline
    from batchmill.spark._session import build_session
    from batchmill.spark._settings import PipelineSettings

__all__ = [
    "BatchReport",
    "BatchStats",
    "MissingSparkError",
    "Pipeline",
    "PipelineError",
    "PipelineSettings",
    "build_session",
    "find_java",
]

_MODULES = {
    "BatchReport": "_engine",
    "BatchStats": "_batch",
    "Pipeline": "_pipeline",
    "PipelineSettings": "_settings",
    "build_session": "_session",
    "find_java": "_java",
}

__getattr__ = lazy_names(__name__, _MODULES, MissingSparkError)
