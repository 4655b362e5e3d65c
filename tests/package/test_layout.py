"""How the source tree and the tests are laid out: sizes of folders, names, who may import what."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.files import ROOT

SOURCE = ROOT / "src" / "batchmill"
TESTS = ROOT / "tests"
MOST_MODULES = 14

PUBLIC_MODULES = frozenset(
    {
        # Listed in `batchmill.pressure`, and used by its name: `strategies.retry(...)`.
        "batchmill.pressure.strategies",
        # Not in its package's __init__, which has to load without prometheus-client.
        "batchmill.telemetry.exposition",
    }
)
"""Modules below a package that others import by name."""

MAY_IMPORT_ALL = {
    "deploy": "compares the manifests in deploy/ with the code",
    "docs": "compares the documentation with the code",
    "kit": "gives the tests of several packages what each would have to look inside for",
}
"""Folders of tests whose subject is not one package, with the reason."""


def folders(root: Path) -> list[Path]:
    """The folder and all below it that hold Python modules."""
    return sorted({path.parent for path in root.rglob("*.py")})


def modules(root: Path) -> frozenset[str]:
    """The names of all modules and packages of batchmill."""
    paths = [path.with_suffix("").relative_to(root.parent) for path in root.rglob("*.py")]
    return frozenset(".".join(path.parts).removesuffix(".__init__") for path in paths)


def imported(tree: ast.AST, known: frozenset[str]) -> Iterator[tuple[int, str]]:
    """The modules of batchmill that a module imports, each with the number of its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            # `from package import name`: the name may be a module.
            names = [
                full if (full := f"{node.module}.{alias.name}") in known else node.module
                for alias in node.names
            ]
        else:
            continue
        for name in names:
            if name.partition(".")[0] == "batchmill":
                yield node.lineno, name


def is_private(module: str) -> bool:
    """Whether a module lies below a package: others use what the package's __init__ lists."""
    return module.count(".") > 1 and module not in PUBLIC_MODULES


@pytest.mark.parametrize("root", [SOURCE, TESTS, ROOT / "benchmarks"], ids=lambda root: root.name)
def test_no_folder_has_too_many_modules(root: Path) -> None:
    """A folder can be read at one look; one that grows past that becomes several."""
    counts = {
        str(folder.relative_to(ROOT)): len(list(folder.glob("*.py"))) for folder in folders(root)
    }
    assert {name: count for name, count in counts.items() if count > MOST_MODULES} == {}


def test_spark_has_six_rooms_of_nine_files() -> None:
    """The package that had grown most is to stay one that can be looked over."""
    counts = {
        folder.relative_to(SOURCE).as_posix(): len(list(folder.glob("*.py")))
        for folder in folders(SOURCE / "spark")
    }
    assert len(counts) <= 6
    assert {name: count for name, count in counts.items() if count > 9} == {}


def test_no_module_name_starts_with_an_underscore() -> None:
    """What is public is said by the package's __init__, not by the names of files."""
    names = [path for path in SOURCE.rglob("*.py") if path.stem.startswith("_")]
    dunder = {"__init__.py", "__main__.py"}
    assert [str(path.relative_to(ROOT)) for path in names if path.name not in dunder] == []


def test_every_package_says_what_it_is_for() -> None:
    """In the docstring of its __init__."""
    missing = [
        str(folder.relative_to(ROOT))
        for folder in folders(SOURCE)
        if not (folder / "__init__.py").is_file()
        or not ast.get_docstring(ast.parse((folder / "__init__.py").read_text("utf-8")))
    ]
    assert missing == []


def test_tests_import_private_modules_of_their_own_package_only() -> None:
    """tests/queue/ may look inside batchmill.queue; of all others it uses the public names.

    So that a package can be changed inside with no more tests to change than its own.
    """
    known = modules(SOURCE)
    wrong = []
    for path in sorted(TESTS.rglob("*.py")):
        folder = path.relative_to(TESTS).parts[0]
        if folder in MAY_IMPORT_ALL:
            continue
        for line, module in imported(ast.parse(path.read_text("utf-8")), known):
            if is_private(module) and module.split(".")[1] != folder:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
    assert not wrong, (
        "use a name that the package's __init__ lists, or move the test to the package it tests:\n"
        + "\n".join(wrong)
    )
