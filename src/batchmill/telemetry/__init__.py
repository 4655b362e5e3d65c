"""Figures of all queues and micro-batchers of a process, for its status."""

from batchmill.telemetry.census import Census

__all__ = ["Census"]
