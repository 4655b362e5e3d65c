"""What segments that were made of messages have beside a span's columns."""

from __future__ import annotations

FOREIGN = "_value"
"""The column that has, in a row of its own, a message that is none of ours."""
