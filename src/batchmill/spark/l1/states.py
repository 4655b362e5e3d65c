"""States of groups from what Spark collects: tallies from lists of keys.

In a list, a key occurs as often as there were rows that differ in something else; the amounts of
equal keys are summed here. As a Spark expression that would be interpreted for every entry, which
took a quarter of a large batch's time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchmill.aggregate import Column, Runs, Tallies
from batchmill.spark.l1.plan import ListedTally, Listing, When

Longs = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class GroupStates:
    """The states of groups."""

    rows: Longs
    """How many rows each group has."""
    totals: dict[str, Column]
    tallies: dict[str, Tallies]


@dataclass(frozen=True)
class Entries:
    """The entries of all lists of a column, sorted by list and key."""

    lists: int
    """How many lists there are."""
    runs: Runs
    amounts: Sequence[Longs]
    """What is summed, of each item of the lists: the count of rows, or measures."""
    texts: pa.Array | None
    """The keys, where they are texts."""

    @classmethod
    def of(
        cls,
        row: Longs,
        lists: int,
        keys: pa.Array,
        amounts: Sequence[Longs],
        kept: Mask | None = None,
    ) -> Entries:
        """Sort items by list and key.

        ``row`` is the list of each item; ``kept`` says which items are entries, None: all.
        """
        texts = None
        if not pa.types.is_integer(keys.type):
            encoded = keys.dictionary_encode()
            keys, texts = encoded.indices, encoded.dictionary
        numbers: npt.NDArray[Any] = keys.fill_null(0).to_numpy().astype(np.int64, copy=False)
        if kept is None:
            return cls(lists, Runs.of(row, lists, numbers), amounts, texts)
        places = np.flatnonzero(kept)
        runs = Runs.of(row[places], lists, numbers[places])
        return cls(lists, replace(runs, order=places[runs.order]), amounts, texts)

    def tallies(self, tally: ListedTally, met: Mask | None) -> Tallies:
        """The tally of each list; ``met`` says which items count, None: all."""
        runs = self.runs.coarsened(tally.coarser, tally.last)
        sums = [runs.sums(amount if met is None else amount * met) for amount in self.amounts]
        return Tallies.of_runs(self.lists, runs, self.texts, sums)


def tallies_of(
    tallies: Mapping[str, ListedTally],
    entries: Callable[[Listing], Entries],
    met: Callable[[Listing, When], Mask | None],
) -> dict[str, Tallies]:
    """Each tally by its column. ``met`` says which items of a list meet conditions; None: all."""
    listed: dict[str, Entries] = {}
    for tally in tallies.values():
        if tally.listing.name not in listed:
            listed[tally.listing.name] = entries(tally.listing)
    return {
        column: listed[tally.listing.name].tallies(tally, met(tally.listing, tally.when))
        for column, tally in tallies.items()
    }
