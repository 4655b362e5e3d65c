"""Checks after a timed run that every item arrived exactly once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Protocol

from benchmarks.queue.work import Expected, Item


class Handler(Protocol):
    """What every contender hands its batches to: the items of one class at a time."""

    def consume(self, batch: list[Item]) -> None:
        """Take a batch."""


class Sink:
    """The handler of one class: keeps what it gets, in the order it gets it."""

    __slots__ = ("arrived",)

    def __init__(self) -> None:
        self.arrived: list[Item] = []

    def consume(self, batch: list[Item]) -> None:
        """Keep the batch. ``extend`` is atomic, so two consumer threads may call this at once."""
        self.arrived.extend(batch)


def make_sinks(classes: Iterable[type[Item]]) -> dict[type[Item], Sink]:
    """One empty sink a class."""
    return {cls: Sink() for cls in classes}


class WrongArrival(Exception):
    """Items were lost, doubled or invented on the way: the contender's figure means nothing."""


def check_arrival(sinks: Mapping[type[Item], Sink], expected: Expected, rounds: int) -> bool:
    """Whether each producer's items of each class also arrived in order.

    Raises WrongArrival unless every item that was produced arrived as often as it was produced.
    """
    ordered = True
    for cls, per_producer in expected.items():
        arrived = _by_producer(sinks[cls].arrived, len(per_producer))
        for producer, sent in enumerate(per_producer):
            if arrived[producer] == sent * rounds:  # the same objects: compared by identity
                continue
            ordered = False
            _check_complete(cls, producer, arrived[producer], sent, rounds)
    return ordered


def _by_producer(items: list[Item], producers: int) -> list[list[Item]]:
    parted: list[list[Item]] = [[] for _ in range(producers)]
    adders = [part.append for part in parted]
    for item in items:
        adders[item.producer](item)
    return parted


def _check_complete(
    cls: type[Item], producer: int, arrived: list[Item], sent: list[Item], rounds: int
) -> None:
    by_number = attrgetter("number")
    wanted = [item for item in sent for _ in range(rounds)]
    if sorted(arrived, key=by_number) != wanted:
        raise WrongArrival(
            f"{cls.__name__}: {len(arrived)} items of producer {producer} arrived"
            f" where {len(wanted)} were produced, or some came twice and others never"
        )
