"""States: what the rows of one entity and bucket are reduced to, for a metric.

A state is a description: equal states of one source are computed once, however many metrics need
them. It describes a *merged* value: values of parts of the rows are added up (of an ``Extreme``,
the greatest or the least is taken), in any order and any grouping. None is the value of no rows,
the neutral element. Rows whose value, label or key is null are skipped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from batchmill.oal.model import Path, Where
from batchmill.oal.values import log_bucket, truncated


@dataclass(frozen=True, slots=True)
class Count:
    """The number of rows. Merged: an int."""

    where: Where


@dataclass(frozen=True, slots=True)
class Sum:
    """The sum of a whole number. Merged: an int, of any size, or None."""

    where: Where
    value: Path


@dataclass(frozen=True, slots=True)
class DoubleSum:
    """The exact sum of a floating number: the order of adding does not matter.

    Merged: four ints ``(i, f1, f2, f3)`` that mean ``i + f1/2^30 + f2/2^60 + f3/2^90`` and are
    summed one by one, or a ``Fraction``, or None. ``exact_double()`` makes a float of it.

    Values up to 2^62 either way can be summed. The part of a value below 2^-90 is cut off: nothing
    of a value that is 0 or at least 2^-38 (4e-12), and less than 2^-90 (8e-28) of a smaller one.
    """

    where: Where
    value: Path


@dataclass(frozen=True, slots=True)
class Extreme:
    """The greatest or the least of a number. Merged: an int or a float, or None."""

    where: Where
    value: Path
    which: Literal["max", "min"]


@dataclass(frozen=True, slots=True)
class Bucketed:
    """A tally's key: the number of the bucket, ``value / precision`` toward zero."""

    value: Path
    precision: int

    def of(self, value: int) -> int:
        """The bucket's number."""
        return truncated(value, self.precision)


@dataclass(frozen=True, slots=True)
class LogBucketed:
    """A tally's key: the number of a bucket that grows with the value, as :func:`log_bucket`."""

    value: Path

    def of(self, value: int) -> int:
        """The bucket's number."""
        return log_bucket(value)


@dataclass(frozen=True, slots=True)
class Clamped:
    """A tally's key: the number of the bucket, ``value / step``, from 0 up to ``steps``."""

    value: Path
    step: int
    steps: int

    def of(self, value: int) -> int:
        """The bucket's number; its lower edge is that times ``step``."""
        return max(0, min(truncated(value, self.step), self.steps))


@dataclass(frozen=True, slots=True)
class Label:
    """A tally's key: a text of the row; a number or a bool as in a script."""

    value: Path


@dataclass(frozen=True, slots=True)
class Tally:
    """The number of rows of each key. Merged: a dict of key to count, or None."""

    where: Where
    key: Bucketed | LogBucketed | Clamped | Label


@dataclass(frozen=True, slots=True)
class LabelSum:
    """Sum and count of a whole number for each label. Merged: a dict of label to both, or None."""

    where: Where
    label: Path
    value: Path


@dataclass(frozen=True, slots=True)
class ApdexCount:
    """The number of rows that are satisfied, or tolerated, by the threshold T of their service.

    Up to T is satisfied, above T and up to 4T tolerated; a row whose status is not true is neither.
    T is a setting of the pipeline, by ``name``. Merged: an int.
    """

    where: Where
    which: Literal["satisfied", "tolerated"]
    value: Path
    status: Path
    name: Path

    def of(self, value: int, threshold: int) -> bool:
        """Whether a successful row with that value counts."""
        if self.which == "satisfied":
            return value <= threshold
        return threshold < value <= 4 * threshold


State: TypeAlias = Count | Sum | DoubleSum | Extreme | Tally | LabelSum | ApdexCount
