"""The Python of the README, of docs/ and of examples/ passes `mypy --strict` as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import symtable
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.kit import PAGES, blocks
from tests.kit.files import ROOT
from tests.kit.threads import PATIENCE_S

WRONG = (
    "# Wrong\n\n```python\nfrom batchmill import BatchQueue\n\nqueue: BatchQueue[int] = 5\n```\n"
)
SETTINGS = "# mypy: implicit-reexport, no-warn-unused-ignores"
"""A block takes what the blocks above it import, as a reader's session does.

Some of its ignores are for names that are not re-exported.
"""


def modules_of(page: Path, folder: Path) -> list[Path]:
    """Each block of a page as a module, at its own lines.

    It imports what it takes from the blocks above it, as a reader has it who ran those. So a name
    may be one thing in one section and another in the next. What differs from the settings of
    ``make lint`` is in the file itself: with the same settings for all else, mypy has read
    batchmill and what it imports before.
    """
    files: list[Path] = []
    places: dict[str, str] = {}
    for block in blocks(page):
        if block.language != "python":
            continue
        table = symtable.symtable(block.text, block.place, "exec")
        bound = {symbol.get_name() for symbol in table.get_symbols() if _is_bound(symbol)}
        used = set(_used(table))
        taken = sorted(name for name in used - bound if name in places)
        imports = "; ".join(f"from {places[name]} import {name} as {name}" for name in taken)
        file = folder / f"{page.stem}_{block.line}.py"
        assert block.line > 2, f"{page}: a page starts with a heading"
        lines = f"{SETTINGS}\n{imports}" + "\n" * (block.line - 2)
        file.write_text(lines + block.text, "utf-8")
        files.append(file)
        places |= dict.fromkeys(bound, file.stem)
    return files


def _is_bound(symbol: symtable.Symbol) -> bool:
    return symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()


def _used(table: symtable.SymbolTable) -> Iterator[str]:
    """The names of the module that a block uses, also in its functions."""
    whole = table.get_type() == "module"
    for symbol in table.get_symbols():
        if symbol.is_referenced() and (whole or symbol.is_global()):
            yield symbol.get_name()
    for inner in table.get_children():
        yield from _used(inner)


def check_types(*paths: Path) -> str:
    """What mypy says; nothing if it finds no error. Of one run, for all files together."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--strict", "--no-error-summary"),
            *("--config-file", str(ROOT / "pyproject.toml"), *map(str, paths)),
        ],
        cwd=ROOT,
        env={
            **os.environ,
            "MYPYPATH": os.pathsep.join(sorted({str(path.parent) for path in paths})),
        },
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE_S,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


@pytest.mark.system
def test_code_of_the_documentation_passes_mypy_strict(tmp_path: Path) -> None:
    """A reader who checks types can copy every block of every page, and every example.

    A page that is wrong is checked along with them, to show that errors are found.
    """
    pytest.importorskip("mypy")
    wrong = tmp_path / "wrong.md"
    wrong.write_text(WRONG)
    modules = [file for page in (*PAGES, wrong) for file in modules_of(page, tmp_path)]
    errors = check_types(ROOT / "examples", *modules).splitlines()
    expected = [line for line in errors if "wrong_4.py" in line]
    others = [line for line in errors if line not in expected]
    assert "\n".join(others) == ""
    assert ["Incompatible types in assignment" in line for line in expected] == [True]


def test_python_is_marked_as_such() -> None:
    """Else nothing checks it, and a reader sees it without colours."""
    hidden = [
        block.place
        for page in PAGES
        for block in blocks(page)
        if block.language == "text" and re.search(r"^(from [\w.]+ )?import \w", block.text, re.M)
    ]
    assert hidden == []
