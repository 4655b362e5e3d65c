"""Event types in tests: what ``@source`` registers inside a block is gone after it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from batchmill.sources import user


@contextlib.contextmanager
def temporary_sources() -> Iterator[None]:
    """Forget the event types that are registered in this block."""
    with mock.patch.dict(user._added), mock.patch.dict(user._by_class):
        yield
