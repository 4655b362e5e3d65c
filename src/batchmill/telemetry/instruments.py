"""Instruments: what is measured of a component, under which name, in which unit.

An instrument has one name in two spellings: ``batchmill.queue.accepted_items`` for OpenTelemetry,
``batchmill_queue_accepted_items_total`` for Prometheus.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

PREFIX = "batchmill"
_SUFFIXES = {"s": "_seconds", "1": "_ratio", "By": "_bytes"}
"""The unit at the end of a Prometheus name, by its UCUM code; a count, ``{item}``, has none."""

_SERIES_SUFFIXES = ("_total", "_bucket", "_count", "_sum", "_created")

_SIZE_BITS = (1, *range(2, 15, 2))
_DURATION_BITS = tuple(range(13, 36, 2))
BATCH_SIZES: Sequence[int] = tuple(2**bits - 1 for bits in _SIZE_BITS)
"""The upper bounds of the buckets for sizes of batches: 1, 3, 15, … 16,383."""
DURATIONS_S: Sequence[float] = tuple(2**bits / 1e9 for bits in _DURATION_BITS)
"""The upper bounds of the buckets for the time of a handler call: 8 µs, 33 µs, … 34 s."""
LONGEST_BITS = 64
"""How many counts by the length of a number in bits there are; see :func:`sizes_by_bits`."""

S = TypeVar("S")


class InstrumentKind(enum.Enum):
    """How values of an instrument change, and how those of equal names are combined."""

    COUNTER = "counter"
    """Only rises, also when a component is closed and made again. Sums."""
    UP_DOWN = "up/down counter"
    """A count of what is there now. Sums."""
    GAUGE = "gauge"
    """A value that it makes no sense to add, such as a level. The highest."""
    HISTOGRAM = "histogram"
    """Counts by size; only rise. Sums."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """How many values fell into each bucket, and their sum, since the start."""

    bounds: Sequence[float]
    """The upper bounds of the buckets, inclusive; one more bucket is for all above."""
    counts: tuple[int, ...]
    """Values in each bucket; one more than bounds."""
    sum: float
    """The sum of all values."""

    @property
    def count(self) -> int:
        """How many values there were."""
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """The mean value; 0 without any."""
        return self.sum / self.count if self.count else 0.0


def merged(bounds: Sequence[float], counts: Sequence[Sequence[int]], total: float) -> Distribution:
    """The distribution of several threads' counts together."""
    nothing = (0,) * (len(bounds) + 1)
    return Distribution(bounds, tuple(map(sum, zip(nothing, *counts, strict=True))), total)


def sizes_by_bits(counts: Sequence[Sequence[int]], total: int) -> Distribution:
    """Batches by size, of several threads that count by ``size.bit_length()``.

    That is the quickest way to find a bucket; its bounds are powers of two for that reason.
    """
    return _by_bits(_SIZE_BITS, BATCH_SIZES, counts, total)


def durations_by_bits(counts: Sequence[Sequence[int]], total_s: float) -> Distribution:
    """The same for durations, counted by ``nanoseconds.bit_length()``."""
    return _by_bits(_DURATION_BITS, DURATIONS_S, counts, total_s)


def _by_bits(
    bits: Sequence[int], bounds: Sequence[float], counts: Sequence[Sequence[int]], total: float
) -> Distribution:
    summed = [sum(column) for column in zip(*counts, strict=True)]
    ends = [0, *(end + 1 for end in bits), LONGEST_BITS]
    buckets = tuple(sum(summed[start:end]) for start, end in itertools.pairwise(ends))
    return Distribution(bounds, buckets, total)


NO_BATCHES = merged(BATCH_SIZES, (), 0)
NO_DURATIONS = merged(DURATIONS_S, (), 0.0)
"""The distributions of a component that has done nothing yet."""

Number: TypeAlias = int | float
Value: TypeAlias = Number | Distribution
Labels: TypeAlias = tuple[str, ...]
Reading: TypeAlias = Value | Mapping[str, Value] | Mapping[tuple[str, str], Value] | None
"""One value; none; or one for each value of the instrument's label, or of both its labels."""


@dataclass(frozen=True, slots=True, eq=False)
class Instrument(Generic[S]):
    """One measure of a component: what it is called, and how it is read from stats ``S``."""

    name: str
    """In the terms of its component, such as ``accepted_items``."""
    kind: InstrumentKind
    unit: str
    """In UCUM, as OpenTelemetry has it: ``s``, ``1`` for a share, ``{item}`` for a count."""
    help: str
    """One sentence."""
    read: Callable[[S], Reading]
    labels: Labels = ()
    """Beside the component's name; their values must be few."""

    def values(self, stats: S) -> dict[Labels, Value]:
        """What the instrument shows for ``stats``, by the values of its labels."""
        reading = self.read(stats)
        if reading is None:
            return {}
        if not isinstance(reading, Mapping):
            return {(): reading}
        return {(key,) if isinstance(key, str) else key: value for key, value in reading.items()}


@dataclass(frozen=True, slots=True, eq=False)
class ComponentKind(Generic[S]):
    """A kind of component: its instruments, and the label with a component's name."""

    name: str
    """Such as ``queue``; part of the name of every instrument."""
    instruments: tuple[Instrument[S], ...]
    label: str | None = None
    """The label that holds a component's name; None: there is only one in a process."""

    def __post_init__(self) -> None:
        _declared.append(self)
        for callback in list(_on_kind):
            callback(self)

    def prometheus_name(self, instrument: Instrument[S]) -> str:
        """The name for Prometheus, without the ``_total`` of a counter."""
        name = f"{PREFIX}_{self.name}_{instrument.name}"
        suffix = _SUFFIXES.get(instrument.unit, "")
        return name if name.endswith(suffix) else name + suffix

    def otel_name(self, instrument: Instrument[S]) -> str:
        """The name for OpenTelemetry."""
        return f"{PREFIX}.{self.name}.{instrument.name}"

    def label_names(self, instrument: Instrument[S]) -> Labels:
        """The labels of an instrument for Prometheus; the component's name is the first."""
        return instrument.labels if self.label is None else (self.label, *instrument.labels)

    def attribute_names(self, instrument: Instrument[S]) -> Labels:
        """The same for OpenTelemetry, in the namespace of the kind."""
        own = () if self.label is None else ("name",)
        return tuple(f"{PREFIX}.{self.name}.{label}" for label in (*own, *instrument.labels))


_declared: list[ComponentKind[Any]] = []
_on_kind: list[Callable[[ComponentKind[Any]], None]] = []


def on_kind(callback: Callable[[ComponentKind[Any]], None]) -> None:
    """Call ``callback`` with each kind that there is, and with later ones when they are made.

    Kinds are made when their module is imported, and not where their first component is: that may
    be under a lock which the callback must not wait for.
    """
    _on_kind.append(callback)
    for kind in list(_declared):
        callback(kind)


def prometheus_names() -> set[str]:
    """All names of series that the instruments of all kinds have on a page for Prometheus."""
    names = {kind.prometheus_name(one) for kind in _declared for one in kind.instruments}
    return {name + suffix for name in names for suffix in ("", *_SERIES_SUFFIXES)}


def counter(
    name: str, unit: str, text: str, read: Callable[[S], Reading], *labels: str
) -> Instrument[S]:
    """An instrument that only rises."""
    return Instrument(name, InstrumentKind.COUNTER, unit, text, read, labels)


def up_down(
    name: str, unit: str, text: str, read: Callable[[S], Reading], *labels: str
) -> Instrument[S]:
    """An instrument for a count of what is there now."""
    return Instrument(name, InstrumentKind.UP_DOWN, unit, text, read, labels)


def gauge(
    name: str, unit: str, text: str, read: Callable[[S], Reading], *labels: str
) -> Instrument[S]:
    """An instrument for a value that is not added up: a level, a share."""
    return Instrument(name, InstrumentKind.GAUGE, unit, text, read, labels)


def histogram(
    name: str, unit: str, text: str, read: Callable[[S], Reading], *labels: str
) -> Instrument[S]:
    """An instrument whose readings are :class:`Distribution`."""
    return Instrument(name, InstrumentKind.HISTOGRAM, unit, text, read, labels)


def increase(before: Value | None, now: Value) -> Value:
    """What was added to a counter or a distribution; never negative."""
    if isinstance(now, Distribution):
        if not isinstance(before, Distribution):
            return now
        counts = tuple(
            max(0, new - old) for new, old in zip(now.counts, before.counts, strict=True)
        )
        return Distribution(now.bounds, counts, max(0.0, now.sum - before.sum))
    return now if before is None or isinstance(before, Distribution) else max(0, now - before)


def added(first: Value | None, second: Value) -> Value:
    """The sum of two values of one instrument."""
    if first is None:
        return second
    if isinstance(first, Distribution) and isinstance(second, Distribution):
        counts = tuple(map(sum, zip(first.counts, second.counts, strict=True)))
        return Distribution(first.bounds, counts, first.sum + second.sum)
    assert not isinstance(first, Distribution)
    assert not isinstance(second, Distribution)
    return first + second


def highest(first: Value | None, second: Value) -> Value:
    """The higher of two values of a gauge."""
    assert not isinstance(first, Distribution)
    assert not isinstance(second, Distribution)
    return max(-math.inf if first is None else first, second)
