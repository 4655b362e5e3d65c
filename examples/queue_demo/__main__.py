from __future__ import annotations

import argparse
import math
import os
import sys

LONGEST_S = 3600.0


def main() -> int:
    """Run the demo as the command line says; the exit code."""
    seconds = _parser().parse_args().seconds
    try:
        import rich  # noqa: F401 - only to see whether it is installed
    except ImportError as error:
        print(
            f"The queue demo draws with rich, which could not be loaded ({error}).\n"
            "Install it with: pip install 'batchmill[cli]'",
            file=sys.stderr,
        )
        return 1
    from examples.queue_demo import demo

    try:
        return demo.run(seconds)
    except KeyboardInterrupt:  # the second Ctrl-C: the first one drains the queues before it ends
        print("queue demo: stopped before everything was drained", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `python -m examples.queue_demo | head`
        # Python flushes stdout once more on its way out, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.queue_demo",
        description="Run four queues of a metrics pipeline side by side, in this process, and "
        "watch depth, throughput, drops, and thread load before and after a rebalance. "
        "Ctrl-C ends it early. The exit code is 1 if anything accepted was not consumed.",
    )
    parser.add_argument(
        "--seconds",
        type=_seconds,
        default=12.0,
        metavar="S",
        help="how long it runs (default: %(default)g)",
    )
    return parser


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= LONGEST_S:  # also refuses nan
        raise argparse.ArgumentTypeError(
            f"{text!r} is not valid: it must be a number above 0, up to {LONGEST_S:g}"
        )
    return value


if __name__ == "__main__":
    sys.exit(main())
