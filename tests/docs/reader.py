"""Somebody who reads a page of the documentation and does what it says."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from batchmill import cli
from batchmill.alerts import load_rules
from batchmill.oal import parse
from batchmill.run import resolve
from tests.docs.kit import DRAWING, NOTES, OUTPUT, Block, blocks, matches, metric_examples
from tests.kit.files import ROOT
from tests.kit.threads import PATIENCE_S

Step = Callable[[], None]

COMMAND = re.compile(r"batchmill\b|#|$")
"""What the lines of a shell block may begin with: nothing else is there to be run."""


class Reader:
    """Somebody who reads a page and does what it says, in a folder of their own."""

    def __init__(self, page: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.page = page
        self.folder = folder
        self.steps: dict[str, Step] = {}
        """What happens meanwhile, by its name."""
        self._capsys = capsys
        self._printed: str | None = None
        self._module = types.ModuleType(f"docs_{page.stem}")
        sys.modules[self._module.__name__] = self._module

    def read(self) -> None:
        """Do all of it."""
        # What a metric comes to is shown on the page of the language: tests/docs/test_oal.py.
        results = {shown.line for _, shown in metric_examples(self.page)}
        for block in blocks(self.page):
            assert block.notes.keys() <= set(NOTES), f"{block.place}: no such note: {block.notes}"
            if name := block.notes.get("file"):
                (self.folder / name).write_text(block.text, "utf-8")
            if not block.runs or block.line in results:
                self._printed = None
                continue
            if step := block.notes.get("meanwhile"):
                self.steps[step]()
            do = self._ways().get(block.language)
            assert do, f"{block.place}: a block of {block.language!r} that nobody can run: mark it"
            if block.language != OUTPUT:
                self._printed = None
            do(block)

    def close(self) -> None:
        """Forget what was defined."""
        del sys.modules[self._module.__name__]

    def _ways(self) -> dict[str, Callable[[Block], None]]:
        return {
            "python": self._python,
            "sh": self._shell,
            "sql": self._sql,
            "toml": self._settings,
            "oal": lambda block: _parsed(block, lambda text: parse(text, file=block.place)),
            "json": lambda block: _parsed(block, json.loads),
            "yaml": lambda block: _parsed(block, lambda text: list(yaml.safe_load_all(text))),
            "properties": self._properties,
            OUTPUT: self._compare,
            DRAWING: self._look,
        }

    def _python(self, block: Block) -> None:
        self._capsys.readouterr()
        # Blank lines in front, so that a traceback names the line of the page.
        code = compile("\n" * (block.line - 1) + block.text, str(block.page), "exec")
        exec(code, vars(self._module))
        self._printed = self._capsys.readouterr().out

    def _shell(self, block: Block) -> None:
        for command in _joined(block.text):
            assert COMMAND.match(command), (
                f"{block.place}: {command!r} cannot run here: mark the block"
            )
        done = subprocess.run(
            ["sh", "-e", "-c", block.text],
            cwd=self.folder,
            env=_environment(self.folder),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        wanted = re.findall(r"\d+", block.notes.get("exits", "0"))
        assert str(done.returncode) in wanted, f"{block.place}:\n{done.stdout}"
        self._printed = done.stdout

    def _sql(self, block: Block) -> None:
        # In a process of its own: at its end DuckDB prints what it has not freed.
        code = "import duckdb, sys; sys.exit(not duckdb.execute(sys.argv[1]).fetchall())"
        done = subprocess.run(
            [sys.executable, "-c", code, block.text],
            cwd=self.folder,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{block.place}: no rows\n{done.stderr}"

    def _compare(self, block: Block) -> None:
        assert self._printed is not None, f"{block.place}: the output of what?"
        assert matches(block.text, self._printed), f"{block.place}: printed was\n{self._printed}"
        self._printed = None

    def _settings(self, block: Block) -> None:
        file = _parsed(block, tomllib.loads)
        if {"rule", "slo"} & file.keys():
            path = self.folder / "alerts.toml"
            path.write_text(block.text)
            load_rules(path)
            return
        resolve(file, block.place, {}, {}, self.folder)

    def _properties(self, block: Block) -> None:
        for line in block.text.splitlines():
            assert re.match(r"[\w.]+=.+$|#|$", line), f"{block.place}: {line!r} is not name=value"

    def _look(self, block: Block) -> None:
        assert not re.search(r"^(batchmill|pip|import|from) ", block.text, re.MULTILINE), (
            f"{block.place}: code in a block of {DRAWING!r}, which is for drawings"
        )


def _parsed(block: Block, read: Callable[[str], Any]) -> Any:
    try:
        return read(block.text)
    except (ValueError, yaml.YAMLError) as error:
        raise AssertionError(f"{block.place}: {error}") from error


def _environment(folder: Path) -> dict[str, str]:
    """With the `batchmill` command of the interpreter that runs the tests."""
    programs = folder / ".bin"
    if not programs.exists():
        programs.mkdir()
        command = programs / "batchmill"
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m batchmill "$@"\n')
        command.chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "120"}


@dataclass(frozen=True)
class Command:
    """A `batchmill` command that a page tells to type."""

    place: str
    words: list[str]
    """What stands behind `batchmill`."""


def commands(page: Path) -> Iterator[Command]:
    """The commands of a page, also those of blocks that are not run."""
    for block in blocks(page):
        if block.language == "sh":
            for line in _joined(block.text):
                words = shlex.split(line, comments=True)
                if words[:1] == ["batchmill"]:
                    yield Command(block.place, words[1:])
        elif block.language == "yaml":
            for document in yaml.safe_load_all(block.text):
                if document.get("kind") == "SparkApplication":
                    yield Command(block.place, document["spec"]["arguments"])


def misunderstood(words: list[str]) -> str:
    """What the real parser says against a command; nothing: it takes it.

    An ellipsis stands for a value, or for further options.
    """
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            _, unknown = cli._parser().parse_known_args(words)
        except SystemExit:
            return errors.getvalue()
    return " ".join(word for word in unknown if word != "…")


def _joined(text: str) -> list[str]:
    """The lines of a shell block, those that go on behind a backslash in one."""
    return re.sub(r"\\\n", " ", text).splitlines()
