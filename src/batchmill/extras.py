"""Packages behind an extra: names that load on first use, and a check that the extra is there."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from batchmill.errors import BatchmillError, MissingExtraError


def lazy_names(
    package: str, modules: Mapping[str, str], *, feature: str, extra: str
) -> Callable[[str], Any]:
    """Make a package's ``__getattr__``, which imports a public name when it is first used.

    The package gets a ``__dir__`` as well, with all names of its ``__all__``.
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

    namespace = vars(sys.modules[package])
    namespace["__dir__"] = lambda: sorted({*namespace, *namespace["__all__"]})
    return get


EXTRAS: Mapping[str, tuple[str, ...]] = {
    "aggregate": ("numpy", "pyarrow"),
    "alerts": ("re2", "yaml"),
    "cli": ("rich",),
    "demo": (
        "opentelemetry.exporter.otlp.proto.grpc",
        "opentelemetry.exporter.otlp.proto.http",
        "opentelemetry.proto",
        "opentelemetry.sdk",
        "requests",
    ),
    "export": (
        "confluent_kafka",
        "google.protobuf",
        "grpc",
        "h11",
        "opentelemetry.proto",
        "prometheus_client",
        "pyarrow",
        "starlette",
        "uvicorn",
    ),
    "kafka": ("confluent_kafka", "google.protobuf", "pyarrow"),
    "otlp": (
        "google.protobuf",
        "google.rpc",
        "h11",
        "h2",
        "opentelemetry.proto",
        "prometheus_client",
        "pyarrow",
        "starlette",
        "uvicorn",
    ),
    "postgres": ("psycopg",),
    "spark": ("numpy", "pandas", "pyarrow", "pyspark"),
    "spool": ("pyarrow",),
    "web": ("h11", "prometheus_client", "re2", "starlette", "uvicorn"),
}
"""The extras of the command line, and the packages that each of them brings."""


def require_extra(feature: str, extra: str, *packages: str) -> None:
    """Raise :class:`MissingExtraError` unless all of ``packages`` can be imported."""
    missing = _missing(packages)
    if missing:
        raise MissingExtraError(feature, extra, _why(missing))


def require_extras(feature: str, *extras: str, also: Iterable[str] = ()) -> None:
    """Raise one :class:`MissingExtraError` for all of ``extras`` that are not installed.

    Those of ``also`` are named in it, too, but are no reason to raise.
    """
    missing = {extra: _missing(EXTRAS[extra]) for extra in dict.fromkeys((*extras, *also))}
    if any(missing[extra] for extra in extras):
        absent = [extra for extra, packages in missing.items() if packages]
        packages = dict.fromkeys(package for extra in absent for package in missing[extra])
        raise MissingExtraError(feature, ",".join(absent), _why(list(packages)))


def lacks_extra(check: Callable[[], object]) -> bool:
    """Whether ``check`` raises :class:`MissingExtraError`; other errors are ignored here."""
    try:
        check()
    except MissingExtraError:
        return True
    except BatchmillError:
        return False
    return False


def _missing(packages: Iterable[str]) -> list[str]:
    return [package for package in packages if not _is_installed(package)]


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the parent package of a dotted name is missing
        return False


def _why(packages: list[str]) -> str:
    return f"{', '.join(packages)} {'is' if len(packages) == 1 else 'are'} not installed"


@contextlib.contextmanager
def left_out(*packages: str) -> Iterator[None]:
    """Have this process work without packages that others use where they are installed.

    Only for a process that is batchmill's alone, and never calls code of its user.
    """
    finders = [_Absent(package) for package in packages if package not in sys.modules]
    sys.meta_path[:0] = finders
    try:
        yield
    finally:
        for finder in finders:
            sys.meta_path.remove(finder)


class _Absent:
    """Finds that a package is not installed."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == self._package:
            raise ModuleNotFoundError(f"{name} is not used in this process", name=name)
