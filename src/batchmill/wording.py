"""Words in messages: numbers with their noun, singular or plural."""

from __future__ import annotations


def count_of(count: int, noun: str, plural: str | None = None) -> str:
    """``count_of(1, "span")`` is "1 span", ``count_of(2500, "span")`` is "2,500 spans"."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"
