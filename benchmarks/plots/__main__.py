"""Draw the plots of all committed results: ``python -m benchmarks.plots [NAME ...]``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks import RESULTS
from benchmarks.plots.drawing import draw


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the plots of all results, or of some."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plots", description=__doc__)
    parser.add_argument("names", nargs="*", help="names of benchmarks (default: all with results)")
    names = parser.parse_args(arguments).names
    for path in sorted(RESULTS.glob("*.json")):
        if not names or path.stem in names:
            print(draw(path) or f"{path}: nothing to draw")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
