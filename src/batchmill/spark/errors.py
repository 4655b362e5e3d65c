"""The error of a pipeline as a whole. Loads without pyspark."""

from __future__ import annotations

from batchmill.errors import BatchmillError


class PipelineError(BatchmillError, RuntimeError):
    """A pipeline cannot start or continue; ``why`` says so, and what to do."""

    why: str
    template = "{why}"
