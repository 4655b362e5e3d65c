"""Items a second by case and contender, and batchmill's ratio to each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from statistics import median
from typing import Any, TypeAlias

from benchmarks.kit.report import Table, said, spread
from benchmarks.pressure.peers import MILL

Cell: TypeAlias = tuple[str, ...]
"""A case: the texts of its columns."""


@dataclass(kw_only=True)
class Rates:
    """Rates of contenders that took turns; one figure a repeat."""

    title: str
    caption: str
    columns: tuple[str, ...]
    rates: dict[Cell, dict[str, list[float]]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def take_turns(
        self, cell: Cell, runs: Mapping[str, Callable[[], float]], repeats: int, rng: Random
    ) -> None:
        """Run the contenders of a case ``repeats`` times, each time in another order."""
        per_name: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(repeats):
            for name in rng.sample(list(runs), len(runs)):
                per_name[name].append(runs[name]())
        self.rates[cell] = per_name

    def ratios(self, cell: Cell, peer: str) -> list[float]:
        """How many times as fast as the peer batchmill was, within each repeat."""
        both = zip(self.rates[cell][MILL], self.rates[cell][peer], strict=True)
        return [mine / theirs for mine, theirs in both]

    def worst_ratio(self, peer: str) -> float | None:
        """The smallest of the cases' medians; None where the peer took no part."""
        return min(self._medians(peer), default=None)

    def best_ratio(self, peer: str) -> float | None:
        """The largest of the cases' medians; None where the peer took no part."""
        return max(self._medians(peer), default=None)

    def _medians(self, peer: str) -> list[float]:
        cells = [cell for cell, per_name in self.rates.items() if peer in per_name]
        return [median(self.ratios(cell, peer)) for cell in cells]

    def tables(self) -> list[Table]:
        """A line for each case and contender."""
        rows = []
        for cell, per_name in self.rates.items():
            for name, rates in per_name.items():
                ratios = [] if name == MILL else self.ratios(cell, name)
                rows.append(
                    [
                        name,
                        *cell,
                        f"{median(rates) / 1e3:,.1f}",
                        spread((rate / 1e3 for rate in rates), digits=1),
                        f"{median(ratios):.2f}x" if ratios else "",
                        spread(ratios) if ratios else "",
                    ]
                )
        headers = ["contender", *self.columns, "k/s", "min..max", "ahead", "min..max"]
        caption = f"{self.caption} {said(self.missing)}".strip()
        return [Table(self.title, caption, headers, rows)]

    def as_json(self) -> dict[str, Any]:
        """Every rate."""
        return {
            "items_per_second": {
                ", ".join(
                    f"{name} {text}" for name, text in zip(self.columns, cell, strict=True)
                ): (per_name)
                for cell, per_name in self.rates.items()
            },
            "missing": self.missing,
        }
