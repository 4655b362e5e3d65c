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
