"""The metrics pipeline on Apache Spark.

Loads without pyspark, so that it can say which extra is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchmill.extras import lazy_names
from batchmill.spark.errors import PipelineError

if TYPE_CHECKING:
    from batchmill.spark.l2.batch import BatchStats
    from batchmill.spark.l2.engine import BatchReport
    from batchmill.spark.runtime.java import find_java
    from batchmill.spark.runtime.pipeline import Pipeline
    from batchmill.spark.runtime.session import build_session
    from batchmill.spark.settings import PipelineSettings

__all__ = [
    "BatchReport",
    "BatchStats",
    "Pipeline",
    "PipelineError",
    "PipelineSettings",
    "build_session",
    "find_java",
]

_MODULES = {
    "BatchReport": "l2.engine",
    "BatchStats": "l2.batch",
    "Pipeline": "runtime.pipeline",
    "PipelineSettings": "settings",
    "build_session": "runtime.session",
    "find_java": "runtime.java",
}

__getattr__ = lazy_names(__name__, _MODULES, feature="the pipeline", extra="spark")
