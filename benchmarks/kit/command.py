"""The command line of a benchmark: which parts to run, the tables, the goals, the JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks import RESULTS
from benchmarks.kit.goals import Goal
from benchmarks.kit.machine import machine, machine_line, use_cores
from benchmarks.kit.report import Result, Table, say, write_json


@dataclass(frozen=True)
class OtherParts:
    """The parts of a results file that a run leaves as they are."""

    document: Mapping[str, Any]

    @classmethod
    def of(
        cls, path: Path | None, chosen: Collection[str], parts: Collection[str], *, quick: bool
    ) -> OtherParts:
        """Those of a file, if there is one and not all parts are chosen.

        Parts of a quick run beside those of a full one would be taken for theirs: that is refused.
        """
        if path is None or not path.exists() or set(chosen) == set(parts):
            return cls({})
        document = json.loads(path.read_text(encoding="utf-8"))
        if document.get("quick", False) != quick:
            kind = "full" if quick else "quick"
            raise SystemExit(f"{path} is of a {kind} run: give another file with --json")
        return cls({name: value for name, value in document.items() if name not in chosen})

    def with_results(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """The results of a run beside those that stay, with the goals and sizes of both."""
        merged = {**self.document, **document}
        goals = [*self.document.get("goals", []), *document["goals"]]
        merged["goals"] = list({(goal["what"], goal["at_least"]): goal for goal in goals}.values())
        if "size" in document:
            merged["size"] = {**self.document.get("size", {}), **document["size"]}
        return merged


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """The parts of a benchmark, in two sizes, and the goals that their results answer."""

    name: str
    about: str
    full: Mapping[str, Callable[[], Result]]
    quick: Mapping[str, Callable[[], Result]]
    goals: Callable[[Mapping[str, Result]], list[Goal]]
    goals_caption: str

    def run(self, arguments: Sequence[str] | None = None) -> int:
        """Run what was asked for, print it, write it down. A missed goal is said, no more."""
        options = self._parser().parse_args(arguments)
        if options.cores:
            use_cores(options.cores)
        started = perf_counter()
        print(machine_line())
        parts = self.quick if options.quick else self.full
        others = OtherParts.of(options.json, options.only, parts, quick=options.quick)
        results: dict[str, Result] = {}
        for name in options.only:
            results[name] = parts[name]()
            for table in results[name].tables():
                print("\n" + table.render(), flush=True)
            goals = self.goals(results)
            document = {
                "machine": machine(),
                "quick": options.quick,
                "goals": [goal.as_json() for goal in goals],
                **{done: result.as_json() for done, result in results.items()},
            }
            # After each part: a later one may fail, hours into the run.
            write_json(options.json, others.with_results(document))
        headers = ["goal", "limit", "measured", ""]
        rows = [goal.row() for goal in goals]
        print("\n" + Table("Goals", self.goals_caption, headers, rows).render())
        say(f"took {perf_counter() - started:.0f} s; results are in {options.json}")
        return 0

    def _parser(self) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(
            prog=f"python -m benchmarks.{self.name}", description=self.about
        )
        parser.add_argument(
            "--quick", action="store_true", help="a run of seconds, too short to quote"
        )
        parser.add_argument(
            "--only",
            type=self._names,
            default=list(self.full),
            metavar="NAME,NAME",
            help=f"some of: {', '.join(self.full)}",
        )
        parser.add_argument("--cores", type=int, metavar="N", help="run on N cores only")
        parser.add_argument(
            "--json",
            type=Path,
            default=RESULTS / f"{self.name}.json",
            help="file for the results",
        )
        return parser

    def _names(self, text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in self.full:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(self.full)}")
        return names
