"""What a metric measures, and in which unit: read from its definition.

So the web UI and ``batchmill query`` show the same, also of metrics of a user's event types.
"""

from __future__ import annotations

from typing import NamedTuple

SCALE = 10_000
"""Shares and scores are stored as whole numbers out of this many."""
_SCALED = {"percent": "share", "rate": "share", "apdex": "score"}
_COUNTS = ("count", "labelCount", "histogram")
_OF_NUMBERS = (
    *("longAvg", "doubleAvg", "percentile", "percentile2", "percentileLog"),
    *("max", "maxDouble", "min", "minDouble", "sum", "sumDouble"),
)
"""Functions whose values are in the unit of what they measure."""


class Unit(NamedTuple):
    """The unit of a metric's values."""

    name: str
    """``per_minute``, ``count``, ``share`` and ``score`` (from 0 to 1), ``percent``, ``ms``,
    ``bytes`` or empty."""
    factor: int = 1
    """A stored value is this many times the value in that unit."""


class Measured(NamedTuple):
    """The parts of a definition before its function."""

    path: str
    """The path that is measured, without its event type and cast; or ``*``."""
    conditions: tuple[str, ...]
    """Those of its filters."""


def read_definition(definition: str, source: str, function: str) -> Measured:
    """What a metric measures.

    >>> read_definition("from(Endpoint.latency).filter(status == true).longAvg()",
    ...                 "Endpoint", "longAvg")
    Measured(path='latency', conditions=('status == true',))
    """
    head = definition.rpartition(f".{function}(")[0]
    path, *filters = head.removeprefix("from(").split(").filter(")
    conditions = tuple(text.removesuffix(")") for text in filters)
    if not conditions:
        path = path.removesuffix(")")
    return Measured(path.rpartition("->")[2].partition(f"{source}.")[2] or path, conditions)


def unit_of(source: str, function: str, path: str) -> Unit:
    """The unit of a metric, by its function, else by the name of what it measures.

    >>> unit_of("Service", "longAvg", "latencyMicros")
    Unit(name='ms', factor=1000)
    """
    if function == "cpm":
        return Unit("per_minute")
    if function in _SCALED:
        return Unit(_SCALED[function], SCALE)
    if function not in _OF_NUMBERS:
        return Unit("count" if function in _COUNTS else "")
    word = path.rpartition(".")[2].lower()
    if word.endswith(("micros", "_us")):
        return Unit("ms", 1000)
    if "latency" in word or "duration" in word or word.endswith(("ms", "millis", "firsttoken")):
        return Unit("ms")
    if word == "time":
        return Unit("ms")
    if word.endswith("percent"):
        return Unit("percent")
    if "bytes" in word or ("Memory" in source and word in ("used", "max", "init")):
        return Unit("bytes")
    return Unit("")
