"""Packages behind an extra: names that load on first use, and a check that the extra is there."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

from batchmill.errors import MissingExtraError


def lazy_names(
    package: str, modules: Mapping[str, str], *, feature: str, extra: str
) -> Callable[[str], Any]:
    """Make a package's ``__getattr__``, which imports a public name when it is first used.

    ``modules`` maps a module of ``package`` to the public names in it, with spaces between them.
    Where a third-party package is missing, the error says that ``feature`` needs ``extra``.
    """
    places = {name: module for module, names in modules.items() for name in names.split()}

    def get(name: str) -> Any:
        module = places.get(name)
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return getattr(importlib.import_module(f"{package}.{module}"), name)
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("batchmill"):
                raise
            raise MissingExtraError(feature, extra, f"{error.name} is not installed") from error

    return get


def require_extra(feature: str, extra: str, *packages: str) -> None:
    """Raise :class:`MissingExtraError` unless all of ``packages`` can be imported."""
    for package in packages:
        try:
            installed = importlib.util.find_spec(package) is not None
        except ModuleNotFoundError:  # the parent package of a dotted name is missing
            installed = False
        if not installed:
            raise MissingExtraError(feature, extra, f"{package} is not installed")
