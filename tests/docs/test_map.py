"""The map of the code names files that exist, and every package."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.kit.files import ROOT

PACKAGE = ROOT / "src" / "batchmill"
MAP = ROOT / "docs" / "architecture.md"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
_PATH = re.compile(r"(?<![\w/.])(?:[a-z_0-9]+/)+(?:[a-zA-Z_0-9.]+\.(?:py|md|json|oal))?")


@pytest.mark.parametrize("page", [MAP, CONTRIBUTING], ids=lambda page: page.name)
def test_every_path_exists(page: Path) -> None:
    """Files and folders, from the root of the repository, of the package, or of one in it."""
    named = set(_PATH.findall(page.read_text("utf-8")))
    assert len(named) > 10
    roots = (ROOT, PACKAGE.parent, PACKAGE, *PACKAGE.iterdir())
    assert not [path for path in named if not any((root / path).exists() for root in roots)]


def test_every_package_is_on_the_map() -> None:
    """With a row of its own in the table of packages."""
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    listed = set(re.findall(r"^\| `(\w+)` \|", MAP.read_text("utf-8"), re.MULTILINE))
    assert packages <= listed


def test_every_module_that_starts_threads_is_on_the_map() -> None:
    """In the table of threads, whose names begin with ``batchmill-``."""
    starting, unnamed = set(), []
    for path in PACKAGE.rglob("*.py"):
        module = path.relative_to(PACKAGE).as_posix()
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                starting |= {module for base in node.bases if ast.unparse(base) in STARTERS}
            if isinstance(node, ast.Call) and ast.unparse(node.func) in STARTERS:
                starting.add(module)
                arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
                # A timer takes no name: its attribute is set.
                is_timer = ast.unparse(node.func) == "threading.Timer"
                if arguments and not is_timer and not any(map(_is_name, arguments)):
                    unnamed.append(f"{module}:{node.lineno}")
    table = MAP.read_text("utf-8").partition("## Where the threads are")[2].partition("\n## ")[0]
    assert len(starting) > 10
    assert sorted(starting - set(re.findall(r"`([\w/]+\.py)`", table))) == []
    assert unnamed == []


STARTERS = ("threading.Thread", "threading.Timer", "InheritableThread", "ThreadPoolExecutor")


def _is_name(argument: ast.expr) -> bool:
    """Whether it is a name that begins with ``batchmill-``, or one that was made elsewhere."""
    text = ast.unparse(argument)
    return "batchmill-" in text or text in ("name", "self._name") or text.startswith("f'{name}")
