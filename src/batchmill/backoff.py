"""How long to wait before the next try."""

from __future__ import annotations


def back_off_ms(initial_ms: float, max_ms: float, multiplier: float, attempt: int) -> float:
    """The delay after the ``attempt``-th try; never past ``max_ms``, however large the power."""
    try:
        return float(min(max_ms, initial_ms * multiplier ** (attempt - 1)))
    except OverflowError:
        return max_ms
