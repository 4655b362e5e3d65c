"""The metrics pipeline on Apache Spark.

Loads without pyspark, so that it can say which extra is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
        raise MissingSparkError(f"{error.name} is not installed") from error
