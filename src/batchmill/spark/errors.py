"""What can go wrong with a pipeline as a whole."""

from __future__ import annotations

from batchmill.errors import BatchmillError


class PipelineError(BatchmillError, RuntimeError):
    """A pipeline cannot do what was asked of it; ``why`` ends with what to do."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why

    def __str__(self) -> str:
        return self.why


class MissingSparkError(BatchmillError, ImportError):
    """PySpark, or something it needs, is not installed; carries ``what``."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what

    def __str__(self) -> str:
        return (
            f"the pipeline runs on Spark, but {self.what}; "
            "install it with: pip install 'batchmill[spark]' (and Java 17 or newer)"
        )
