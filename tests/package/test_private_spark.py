"""PySpark's private names in our code are those that the docs list, each with a reason."""

from __future__ import annotations

import ast

from tests.kit.files import ROOT

PRIVATE = {
    "_active_spark_context",
    "_gateway",
    "_instantiatedSession",
    "_jconf",
    "_jdf",
    "_jsc",
    "_jsparkSession",
    "_jvm",
    "_origin",
    "_sc",
    "_stackTrace",
}
"""The names by which a caller gets at PySpark's inside."""


def test_private_names_of_pyspark_are_listed() -> None:
    """Those that are used, and no others."""
    used = set()
    for path in (ROOT / "src" / "batchmill" / "spark").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [
                node.attr if isinstance(node, ast.Attribute) else "",
                node.value if isinstance(node, ast.Constant) else "",
            ]
            used |= PRIVATE.intersection(name for name in names if isinstance(name, str))
    text = (ROOT / "docs" / "architecture.md").read_text()
    _, _, table = text.partition("Only public API of PySpark is used, except for:")
    table = table.partition("\n\n#")[0]
    assert used == {name for name in PRIVATE if name in table}
