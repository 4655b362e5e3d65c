"""Numbers on the command line."""

from __future__ import annotations

import argparse
from typing import Any


def above_zero(kind: type) -> Any:
    """What reads an argument that is such a number, ``int`` or ``float``."""
    what = "a whole number above 0" if kind is int else "a number above 0"

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = -1
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text!r} is not valid: it must be {what}")
        return value

    return read
