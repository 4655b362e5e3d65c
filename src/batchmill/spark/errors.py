"""The error of a pipeline as a whole. Loads without pyspark."""

from __future__ import annotations

from batchmill.errors import BatchmillError


class PipelineError(BatchmillError, RuntimeError):
    """A pipeline cannot start or continue; ``why`` says so, and what to do."""

    why: str
    template = "{why}"


class BatchTooLargeError(BatchmillError, MemoryError):
    """The input of a batch turned out to have more rows than memory allows; it can be divided."""

    rows: int
    most: int
    template = "the input has {rows:,} rows, more than the {most:,} that the heap allows in a batch"
