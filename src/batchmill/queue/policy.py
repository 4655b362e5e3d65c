"""How many threads and how many partitions: the caller states intent, the queue resolves it."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Literal

from batchmill.errors import ConfigError

_YEAR_MS = 365 * 24 * 3600 * 1000


def available_cores() -> int:
    """How many cores this process may use (its affinity where the system has one)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0)) or 1
    return os.cpu_count() or 1


def check_count(field: str, value: object, least: int = 1, what: str = "whole number") -> int:
    """``value`` as an int, or a ConfigError that names ``field``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(field, value, f"a {what} of at least {least}")
    return value


def check_positive(field: str, value: object) -> float:
    """``value`` as a finite float above zero, or a ConfigError that names ``field``."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(field, value, "a number above 0")
    if not math.isfinite(value) or value <= 0:
        raise ConfigError(field, value, "a finite number above 0")
    return float(value)


def check_ms(field: str, value: object) -> float:
    """``value`` as a time in milliseconds above zero, or a ConfigError that names ``field``."""
    if check_positive(field, value) > _YEAR_MS:
        raise ConfigError(field, value, f"at most a year, {_YEAR_MS:,} ms")
    return float(value)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class ThreadPolicy:
    """How many drain threads a queue or a shared scheduler gets; never fewer than one.

    Make one with :meth:`fixed`, :meth:`cpu_cores`, :meth:`cpu_cores_with_base` or
    :meth:`io_bound`. Two policies are equal when they say the same thing.
    """

    kind: Literal["fixed", "cpu_cores", "io_bound"]
    base: int
    per_core: float

    def __post_init__(self) -> None:
        check_count("base", self.base, least=0 if self.kind == "cpu_cores" else 1)

    @staticmethod
    def fixed(count: int) -> ThreadPolicy:
        """Exactly ``count`` threads, whatever the machine."""
        return ThreadPolicy("fixed", check_count("count", count), 0.0)

    @staticmethod
    def cpu_cores(multiplier: float) -> ThreadPolicy:
        """``multiplier`` threads per core, rounded half up: 0.25 on 8 cores is 2."""
        return ThreadPolicy("cpu_cores", 0, check_positive("multiplier", multiplier))

    @staticmethod
    def cpu_cores_with_base(base: int, multiplier: float) -> ThreadPolicy:
        """``base`` threads and ``multiplier`` more per core: (1, 0.25) on 8 cores is 3."""
        return ThreadPolicy(
            "cpu_cores",
            check_count("base", base, least=0),
            check_positive("multiplier", multiplier),
        )

    @staticmethod
    def io_bound(count: int) -> ThreadPolicy:
        """Exactly ``count`` threads for handlers that mostly wait (sockets, disks, databases).

        The count is how many waits should overlap, so it has nothing to do with cores and may be
        far above them. It resolves like :meth:`fixed`; the name tells the reader why.
        """
        return ThreadPolicy("io_bound", check_count("count", count), 0.0)

    def resolve(self, cores: int | None = None) -> int:
        """The number of threads on ``cores`` cores (default: this process's), at least 1."""
        if cores is None:
            cores = available_cores()
        return max(1, self.base + math.floor(self.per_core * cores + 0.5))

    def __str__(self) -> str:
        if self.kind != "cpu_cores":
            return f"{self.kind}({self.base})"
        if self.base:
            return f"cpu_cores_with_base({self.base}, {self.per_core:g})"
        return f"cpu_cores({self.per_core:g})"


@dataclass(frozen=True, slots=True)
class PartitionPolicy:
    """How many partitions a queue has.

    Make one with :meth:`fixed`, :meth:`thread_multiply` or :meth:`adaptive`.
    """

    kind: Literal["fixed", "thread_multiply", "adaptive"]
    count: int

    def __post_init__(self) -> None:
        check_count("count", self.count)

    @staticmethod
    def fixed(count: int) -> PartitionPolicy:
        """Exactly ``count`` partitions."""
        return PartitionPolicy("fixed", check_count("count", count))

    @staticmethod
    def thread_multiply(multiplier: int) -> PartitionPolicy:
        """``multiplier`` partitions for every drain thread."""
        return PartitionPolicy("thread_multiply", check_count("multiplier", multiplier))

    @staticmethod
    def adaptive(multiplier: int = 25) -> PartitionPolicy:
        """Grows as handlers register: one partition each up to ``multiplier`` per thread.

        Past that, every second handler adds one. A handler counts by its weight.
        """
        return PartitionPolicy("adaptive", check_count("multiplier", multiplier))

    def resolve(self, threads: int, weighted_handlers: float = 0) -> int:
        """The number of partitions for ``threads`` threads and handlers of that total weight.

        >>> PartitionPolicy.adaptive().resolve(8, 500)
        350
        """
        if self.kind == "fixed":
            return self.count
        if self.kind == "thread_multiply":
            return self.count * threads
        # Weights are summed as floats: 100 handlers of 0.05 must count as 5, not as 5.0000001.
        handlers = math.ceil(round(weighted_handlers, 6))
        if handlers <= 0:
            return threads
        one_to_one = threads * self.count
        if handlers <= one_to_one:
            return handlers
        return one_to_one + (handlers - one_to_one) // 2

    def __str__(self) -> str:
        return f"{self.kind}({self.count})"
