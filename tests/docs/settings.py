"""The tables of commands and settings in docs/operations.md: `python -m tests.docs.settings`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator

from batchmill import cli
from batchmill.run import SETTINGS
from tests.docs.kit import DOCS

PAGE = DOCS / "operations.md"
BEGIN = "<!-- The tables from here on are made by `python -m tests.docs.settings`. -->\n"


def made() -> str:
    """The tables, from the command's own parser and settings."""
    return "\n".join([*_commands(), *_settings()]) + "\n"


def _commands() -> Iterator[str]:
    yield from (
        "",
        "## All commands",
        "",
        "`batchmill COMMAND --help` prints the options of a command.",
        "",
    )
    yield from ("| command | description |", "|---|---|")
    for name, text in sorted(_actions(cli._parser()).items()):
        yield f"| `batchmill {name}` | {text} |"


def _actions(parser: argparse.ArgumentParser) -> dict[str, str]:
    """The commands of a parser, those below them in full, each with its help."""
    commands: dict[str, str] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, below in action.choices.items():
                inner = {f"{name} {command}": text for command, text in _actions(below).items()}
                commands |= inner or {name: helps.get(name, "")}
    return commands


def _settings() -> Iterator[str]:
    yield from ("", "## All settings", "")
    yield "The settings of `batchmill run`: `http_port` in `batchmill.toml` is the variable"
    yield "`BATCHMILL_HTTP_PORT` and the flag `--http-port`. `export_to` may also be"
    yield "written as `to` in a table `[export]`."
    yield from ("", "| setting | default | description |", "|---|---|---|")
    for setting in SETTINGS:
        default = "" if setting.default in (None, ()) else f"`{json.dumps(setting.default)}`"
        secret = "; never shown" if setting.secret else ""
        yield f"| `{setting.name}` | {default} | {setting.help}{secret} |"


def main() -> None:
    """Write the tables."""
    kept, _, _ = PAGE.read_text("utf-8").partition(BEGIN)
    PAGE.write_text(kept + BEGIN + made(), "utf-8")


if __name__ == "__main__":
    main()
