"""The metrics pipeline on Apache Spark.

:class:`Pipeline` reads events from a spool or a Kafka topic and commits metrics to a store, exactly
once; :func:`metrics` reads them as a DataFrame, :func:`spans` the spans that are kept. The package
loads without pyspark, so that it can say which extra is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchmill.extras import lazy_names
from batchmill.spark.errors import PipelineError

if TYPE_CHECKING:
    from batchmill.spark.batch.report import BatchReport, BatchStats
    from batchmill.spark.frames import metrics, spans
    from batchmill.spark.iceberg import IcebergExport, SpanExport, export_spans, iceberg_conf
    from batchmill.spark.runtime.java import find_java
    from batchmill.spark.runtime.pipeline import Pipeline
    from batchmill.spark.settings import PipelineSettings

__all__ = [
    "BatchReport",
    "BatchStats",
    "IcebergExport",
    "Pipeline",
    "PipelineError",
    "PipelineSettings",
    "SpanExport",
    "export_spans",
    "find_java",
    "iceberg_conf",
    "metrics",
    "spans",
]

_MODULES = {
    "batch.report": "BatchReport BatchStats",
    "frames": "metrics spans",
    "iceberg": "IcebergExport SpanExport export_spans iceberg_conf",
    "runtime.java": "find_java",
    "runtime.pipeline": "Pipeline",
    "settings": "PipelineSettings",
}

__getattr__ = lazy_names(__name__, _MODULES, feature="the pipeline", extra="spark")
