"""The fixture that runs a test once with each backend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.kit.stores import Backend


@pytest.fixture(params=["sqlite", "postgresql"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """An empty place for a store; what the test opens there is closed after it."""
    from tests.kit.stores import Backend, backend_url  # only tests of the store need it

    place = Backend(backend_url(request.param, request))
    yield place
    place.close()
