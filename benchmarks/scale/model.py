"""The throughput of larger clusters, worked out of the results of ``benchmarks.scale``.

    python -m benchmarks.scale.model

prints the tables of docs/scale.md, which a test holds against the results.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks import RESULTS
from benchmarks.scale.cluster import DRIVER_JVM, DRIVER_PYTHON, EXECUTORS, POSTGRES

SCALE_JSON = RESULTS / "scale.json"
CORES = (10, 100, 1_000)
_UNKNOWN_FROM = 1_000
"""From so many cores on, most of the work may be what the model has no constant for: the pieces of
the shuffle."""
MILLION = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Model:
    """The constants: processor seconds. What more tasks cost is not among them yet."""

    executors: float
    """Of the executors for a million events."""
    rows: float
    """Rows of deltas that an event becomes, of all grains."""
    new_rows: float
    """Of PostgreSQL for a million rows, five sixths of them new."""
    batch: float
    """Of the driver for a batch."""

    @classmethod
    def of(cls, results: Mapping[str, Any]) -> Model:
        """The constants in a file of results."""
        *_, most = results["executors"].values()
        # The last is the one with more metrics.
        *_, many_groups, _ = results["driver"].values()
        return cls(
            executors=_cpu(most, EXECUTORS) * MILLION / most["case"]["events"],
            rows=_merged(most) / most["case"]["events"],
            new_rows=_cpu(many_groups, POSTGRES) * MILLION / _merged(many_groups),
            batch=_driver(most),
        )

    def events(self, cores: int) -> float:
        """Events a second, as far as the executors are concerned."""
        return cores / self.executors * MILLION

    def merged(self, cores: int) -> float:
        """Rows of deltas a second."""
        return self.events(cores) * self.rows

    def servers(self, cores: int) -> float:
        """Cores of PostgreSQL that are busy."""
        return self.merged(cores) / MILLION * self.new_rows


def tables(results: Mapping[str, Any]) -> list[list[str]]:
    """The tables of the page: goals, constants, and the model; each as lines of Markdown."""
    return [_goals(results), _constants(Model.of(results)), _model(Model.of(results))]


def _goals(results: Mapping[str, Any]) -> list[str]:
    rows = [
        [
            goal["what"],
            f"{goal['limit']:g}{goal['unit']}",
            f"{goal['value']:.3g}{goal['unit']}",
            goal["verdict"],
        ]
        for goal in results["goals"]
    ]
    return _markdown(["goal", "at most", "measured", ""], rows)


def _constants(model: Model) -> list[str]:
    return _markdown(
        ["constant", "processor time"],
        [
            ["executors, a million events", f"{model.executors:.2f} s"],
            ["PostgreSQL, a million delta rows, most of them new", f"{model.new_rows:.1f} s"],
            ["driver, a batch", f"{model.batch * 1000:.0f} ms"],
        ],
    )


def _model(model: Model) -> list[str]:
    rows = [
        [
            f"{cores:,}",
            _millions(model.events(cores))
            + (", if they reach it: not known" if cores >= _UNKNOWN_FROM else ""),
            _millions(model.merged(cores)),
            f"{model.servers(cores):,.0f}",
        ]
        for cores in CORES
    ]
    headers = ["executor cores", "events/s", "delta rows/s", "PostgreSQL, cores"]
    return _markdown(headers, rows)


def _millions(count: float) -> str:
    """A number in millions, with three digits that count: 13.6, 1,360."""
    return f"{float(f'{count / MILLION:.3g}'):,.9g} million"


def _markdown(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    marks = ["---", *["--:"] * (len(headers) - 1)]
    return [f"| {' | '.join(line)} |" for line in (headers, marks, *rows)]


def _cpu(turns: Mapping[str, Any], role: str) -> float:
    return float(median(turn["cpu_s"][role] for turn in turns["turns"]))


def _driver(turns: Mapping[str, Any]) -> float:
    return _cpu(turns, DRIVER_PYTHON) + _cpu(turns, DRIVER_JVM)


def _merged(turns: Mapping[str, Any]) -> float:
    return float(median(turn["merged"] for turn in turns["turns"]))


def main() -> int:
    """Print the tables."""
    results = json.loads(SCALE_JSON.read_text(encoding="utf-8"))
    print("\n\n".join("\n".join(lines) for lines in tables(results)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
