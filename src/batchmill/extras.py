"""Names that are imported when they are first asked for, and say which extra they need."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(
    package: str, modules: Mapping[str, str], missing: Callable[[str], ImportError]
) -> Callable[[str], Any]:
    """A package's ``__getattr__``: ``modules`` tells in which module of it each name stands.

    ``missing`` is the error for when something that is not batchmill's own is not installed.
    """

    def get(name: str) -> Any:
        module = modules.get(name)
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return getattr(importlib.import_module(f"{package}.{module}"), name)
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("batchmill"):
                raise
            raise missing(f"{error.name} is not installed") from error

    return get
