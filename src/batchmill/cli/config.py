"""``batchmill config``: the settings of ``batchmill run`` and where each comes from."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from typing import Any

from batchmill.cli.options import add_settings_options, settings_of
from batchmill.errors import BatchmillError
from batchmill.run import FILE, HIDDEN, PREFIX, SettingValue


def add_parser(commands: Any) -> None:
    """Add the command."""
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


def run(given: argparse.Namespace) -> int:
    """Print the settings; the exit code."""
    try:
        values = settings_of(given).values
    except BatchmillError as error:
        print(f"batchmill config: {error}", file=sys.stderr)
        return 2
    if given.json:
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
