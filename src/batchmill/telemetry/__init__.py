"""What a process tells of itself: stats of all its queues and batchers, and Prometheus pages.

:class:`ProcessStats` is for status files. :mod:`batchmill.telemetry.exposition` writes pages for
Prometheus; it needs prometheus-client, so it is imported by its own name.
"""

from batchmill.telemetry.process_stats import ProcessStats

__all__ = ["ProcessStats"]
