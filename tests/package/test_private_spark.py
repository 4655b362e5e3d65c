"""PySpark's private names in our code are those that the docs list, each with a reason."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.kit.files import ROOT

PACKAGE = ROOT / "src" / "batchmill"
OURS = {("spark/files/paths.py", name) for name in ("hidden", "path", "source", "through")}
"""Variables with an object of a class of the same file, which may use its private names."""
BY_NAME = {"getattr", "hasattr", "setattr", "attrgetter", "methodcaller"}
"""Functions to which the name of an attribute is given as a text."""
PUBLIC_MODULES = {
    "pyspark",
    "pyspark.errors",
    "pyspark.sql",
    "pyspark.sql.types",
}


def private_names(text: str, file: str = "") -> Iterator[str]:
    """The private attributes of anything but ``self``, ``cls`` and what is ours."""
    for node in ast.walk(ast.parse(text)):
        names: list[object] = []
        match node:
            case ast.Attribute(value=ast.Name(id=owner)) if (
                owner in ("self", "cls") or (file, owner) in OURS
            ):
                pass
            case ast.Attribute(attr=name):
                names = [name]
            case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called), args=given) if (
                called in BY_NAME
            ):
                names = [value.value for value in given if isinstance(value, ast.Constant)]
            case ast.ImportFrom(module=str(module), names=imported) if module.partition(".")[0] in (
                "py4j",
                "pyspark",
            ):
                names = [one.name for one in imported]
        yield from (
            name
            for name in names
            if isinstance(name, str) and name.startswith("_") and not name.endswith("__")
        )


def test_private_names_are_noticed() -> None:
    """Whatever they are called, and however they are reached."""
    noticed = {
        "session._jvm": ["_jvm"],
        "frame.where('x')._anything()": ["_anything"],
        "getattr(error, '_origin', None)": ["_origin"],
        "operator.attrgetter('_jdf')": ["_jdf"],
        "from pyspark.sql import _helper": ["_helper"],
        "self._session._jsc": ["_jsc"],
    }
    assert {text: list(private_names(text)) for text in noticed} == noticed
    for text in ("self._own", "cls._own", "type(x).__name__", "getattr(self, name)", "x.public"):
        assert list(private_names(text)) == []


def test_private_names_of_pyspark_are_listed() -> None:
    """With the files that use them: those, and no others."""
    used = {
        (name, file)
        for path, file in _modules()
        for name in private_names(path.read_text("utf-8"), file)
    }
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    _, _, table = text.partition("Only public API of PySpark is used, except for:")
    rows = [line.split("|") for line in table.partition("\n\n#")[0].splitlines() if "`" in line]
    listed = {
        (name, file)
        for _, names, files, *_ in rows
        for name in re.findall(r"_\w+", names)
        for file in re.findall(r"`(.+?)`", files)
    }
    assert used == listed


def test_no_module_of_pyspark_is_used_that_has_no_reference() -> None:
    """Of pyspark.sql, for example, the modules on the pages of its API reference."""
    modules = set()
    for path, _ in _modules():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            match node:
                case ast.ImportFrom(module=str(module)):
                    modules.add(module)
                case ast.Import(names=imported):
                    modules.update(one.name for one in imported)
    assert {name for name in modules if name.partition(".")[0] == "pyspark"} <= PUBLIC_MODULES


def _modules() -> Iterator[tuple[Path, str]]:
    """The modules of the pipeline, with their paths as the docs have them."""
    for path in (PACKAGE / "spark").rglob("*.py"):
        yield path, path.relative_to(PACKAGE).as_posix()
