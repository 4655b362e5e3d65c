"""How long a peer wants to be left alone: the header ``Retry-After``."""

from __future__ import annotations

import email.utils


def retry_after_s(header: str | None, now_s: float) -> float | None:
    """The header, which is seconds or a date, in seconds from now; None: it says neither.

    >>> retry_after_s("7", 0.0), retry_after_s("Thu, 01 Jan 1970 00:01:00 GMT", 50.0)
    (7.0, 10.0)
    """
    text = (header or "").strip()
    if text.isascii() and text.isdecimal():
        return float(text)
    try:
        moment = email.utils.parsedate_to_datetime(text)
        return max(0.0, moment.timestamp() - now_s)
    except (ValueError, OverflowError):
        return None
