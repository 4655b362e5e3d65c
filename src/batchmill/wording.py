"""Words in messages: numbers with their noun, singular or plural."""

from __future__ import annotations


def count_of(count: int, noun: str, plural: str | None = None) -> str:
    """``count_of(1, "span")`` is "1 span", ``count_of(2500, "span")`` is "2,500 spans"."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def duration(seconds: float) -> str:
    """A duration in its largest useful unit.

    >>> duration(7.4), duration(200), duration(90_000)
    ('7 s', '3 min', '25 h')
    """
    if seconds < 120:
        return f"{max(0.0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
