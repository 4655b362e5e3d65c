"""What helps to test code that uses batchmill: a clock that is moved by hand."""

from batchmill.testing.clock import ManualClock

__all__ = ["ManualClock"]
