"""Every file under examples/ runs by itself and prints what its docstring says it prints."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.kit.files import ROOT
from tests.kit.threads import PATIENCE_S

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
POSTGRES = ROOT / "examples" / "batcher_postgres.py"
"""It needs a database."""


def promised(example: Path) -> str:
    """What stands under "Prints:" in an example's docstring."""
    docstring = ast.get_docstring(ast.parse(example.read_text(encoding="utf-8"))) or ""
    _, heading, output = docstring.partition("\nPrints:\n\n")
    assert heading, f"{example.name} does not say what it prints"
    return textwrap.dedent(output) + "\n"


def test_there_is_an_example_for_each_usage_of_thresholds() -> None:
    """Reject, own handler, levels, priorities, dead letters, observability: six examples."""
    assert [path.stem[:11] for path in EXAMPLES if path.stem.startswith("threshold_")] == [
        f"threshold_{number}" for number in range(1, 7)
    ]


def output_of(example: Path, *arguments: str) -> tuple[int, str, str]:
    """The exit code and what it prints, with warnings as errors."""
    result = subprocess.run(
        [sys.executable, "-W", "error", str(example), *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    return result.returncode, result.stdout, result.stderr


@pytest.mark.parametrize(
    "example", [path for path in EXAMPLES if path != POSTGRES], ids=lambda example: example.stem
)
def test_an_example_prints_what_it_says(example: Path) -> None:
    """It ends by itself, prints what it promises, warns of nothing and complains of nothing."""
    assert output_of(example) == (0, promised(example), "")


def test_the_example_with_postgresql_prints_what_it_says(postgres_url: str) -> None:
    """The same with a real server: one poison row, every payment sent twice."""
    assert output_of(POSTGRES, postgres_url) == (0, promised(POSTGRES), "")
