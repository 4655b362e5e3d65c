"""``python -m tests.soak``: a whole run under load and disturbances, with a balance and curves.

Exit code 0: it passed; 1: something was lost, or grew beyond its bound.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.soak.report import draw, write
from tests.soak.schedule import KINDS, Plan, Traffic, unknown_kinds
from tests.soak.soak import run_soak


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a soak and print what it found."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="how long (default: 30)")
    parser.add_argument("--hours", type=float, help="how long, in hours")
    parser.add_argument("--seed", type=int, default=1, help="the same schedule again (default: 1)")
    parser.add_argument("--spans", type=float, default=2_000.0, help="a second (default: 2000)")
    parser.add_argument("--burst", type=float, default=10.0, help="times as many in a burst")
    parser.add_argument(
        "--spacing", type=float, default=20.0, help="seconds between disturbances (default: 20)"
    )
    parser.add_argument(
        "--without", action="append", default=[], metavar="KIND", help=f"one of: {', '.join(KINDS)}"
    )
    parser.add_argument("--out", type=Path, default=Path("build/soak"), help="for the results")
    parser.add_argument("--work", type=Path, help="for all state (default: a temporary folder)")
    given = parser.parse_args(arguments)
    if names := unknown_kinds(given.without):
        parser.error(f"--without {names[0]}: it is none of {', '.join(KINDS)}")
    plan = Plan(
        seconds=given.hours * 3600 if given.hours else given.minutes * 60,
        seed=given.seed,
        traffic=Traffic(spans_per_s=given.spans, burst=given.burst),
        without=frozenset(given.without),
        spacing_s=given.spacing,
    )
    if given.work is None:
        with tempfile.TemporaryDirectory(prefix="batchmill-soak-") as folder:
            return _run(plan, Path(folder), given.out)
    given.work.mkdir(parents=True, exist_ok=True)
    return _run(plan, given.work, given.out)


def _run(plan: Plan, work: Path, out: Path) -> int:
    result = run_soak(plan, work, say)
    write(result, out)
    if importlib.util.find_spec("matplotlib") is None:
        say("no curves: matplotlib is not installed")
    else:
        draw(out, out / "soak.svg")
    say("\n".join([*result.lines(), f"samples and curves: {out}"]))
    return 1 if result.problems else 0


def say(text: str) -> None:
    """To the terminal, at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
