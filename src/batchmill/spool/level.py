"""How much pressure there is, with a word for none."""

from __future__ import annotations

import enum

from batchmill.pressure import ThresholdLevel


class Level(enum.IntEnum):
    """How far the spool is filled; compares with a ``ThresholdLevel``, and a higher one is greater.

    From CRITICAL on, batches are refused.
    """

    NORMAL = 0
    WARNING = ThresholdLevel.WARNING
    CRITICAL = ThresholdLevel.CRITICAL
    CRITICAL_PLUS = ThresholdLevel.CRITICAL_PLUS
