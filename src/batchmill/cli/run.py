"""``batchmill run``: the whole pipeline in one folder; and ``batchmill config``: its settings."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from batchmill.cli.options import add_settings_options, number, settings_of
from batchmill.cli.pipeline import check_pipeline
from batchmill.run import (
    FILE,
    HIDDEN,
    PREFIX,
    Home,
    RunSettings,
    SettingValue,
    check_settings,
    pipeline_spec,
)

FOREVER = "forever"
LONGEST_DEMO_S = 86_400.0


def add_parser(commands: Any) -> None:
    """Add both commands."""
    parser = commands.add_parser(
        "run",
        help="receive spans and compute metrics: everything, in one folder",
        description="Start ingest, pipeline, exporters and web UI, restart what dies, and show "
        "what happens. Ctrl-C lets ingest finish its requests and the pipeline read the rest, then "
        "stops; a second Ctrl-C stops at once. Settings come from the options, from BATCHMILL_… "
        "variables and from batchmill.toml, in this order; `batchmill config show` lists them.",
    )
    parser.add_argument(
        "--demo",
        type=_demo_seconds,
        metavar="SECONDS",
        help=f"also send the spans of a simulated shop, for so long or {FOREVER}; ends with a "
        "balance, and the exit code is 1 if it does not balance",
    )
    parser.add_argument("--demo-seed", type=int, metavar="N", help="for the same spans again")
    add_settings_options(parser)
    config = commands.add_parser("config", help="look at the settings of `batchmill run`")
    actions = config.add_subparsers(dest="action", required=True, metavar="action")
    show = actions.add_parser(
        "show",
        help="print each setting and where its value comes from",
        description="Print each setting, its value, and where that comes from: the command line, "
        f"the environment ({PREFIX}…), {FILE}, or the default. Secrets are hidden.",
    )
    add_settings_options(show)
    show.add_argument("--json", action="store_true", help="one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Run it; the exit code."""
    settings = settings_of(arguments)
    check_run(settings, demo=arguments.demo is not None)
    from batchmill.run import Demo, run_processes

    demo = None if arguments.demo is None else Demo(arguments.demo, arguments.demo_seed)
    return run_processes(settings, demo)


def check_run(settings: RunSettings, *, demo: bool) -> None:
    """Raise, before anything is started, if a process of the run would not start."""
    check_settings(settings, demo=demo)
    home = Home(Path(settings["home"]).absolute())
    check_pipeline("batchmill run", pipeline_spec(settings, home).arguments)


def _demo_seconds(text: str) -> float:
    if text == FOREVER:
        return math.inf
    try:
        return number(LONGEST_DEMO_S)(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, or {FOREVER}") from None


def run_config(arguments: argparse.Namespace) -> int:
    """Print the settings; the exit code."""
    values = settings_of(arguments).values
    if arguments.json:
        shown = {
            name: {"value": value.shown(), "from": value.origin} for name, value in values.items()
        }
        print(json.dumps(shown, ensure_ascii=False))
    else:
        print(*lines(values.values()), sep="\n")
    return 0


def lines(values: Iterable[SettingValue]) -> list[str]:
    """Settings as text: name, value as in TOML, origin."""
    rows = [(value.setting.name, _toml(value.shown()), value.origin) for value in values]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return [f"{name:{widths[0]}}  {value:{widths[1]}}  {origin}" for name, value, origin in rows]


def _toml(value: Any) -> str:
    if value is None:
        return "-"
    return HIDDEN if value == HIDDEN else json.dumps(value, ensure_ascii=False)
