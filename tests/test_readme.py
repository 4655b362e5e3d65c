"""What the README tells a newcomer to type does what the README says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(text: str) -> list[tuple[str, str]]:
    """Every fenced block of a page: its language and its text."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def run(code: str) -> subprocess.CompletedProcess[str]:
    """Run code as a script of its own, with every warning an error."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_readme_example_prints_what_the_readme_shows() -> None:
    """The first example runs as written and its output is the block below it."""
    (_, code), (_, expected) = (block for block in blocks(README)[1:3])
    result = run(code)
    assert (result.stdout, result.stderr) == (expected, "")


def test_the_readme_example_is_ten_lines() -> None:
    """'Ten lines' is what it says: statements, not counting the import and blank lines."""
    code = blocks(README)[1][1]
    lines = [line for line in code.splitlines() if line.strip() and "import" not in line]
    assert len(lines) <= 10


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    """Links between our own pages name files that exist."""
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize(
    ("page", "number"),
    [
        pytest.param(page, number, id=f"{page.name}-{number}")
        for page in PAGES
        for number, (language, _) in enumerate(blocks(page.read_text(encoding="utf-8")))
        if language == "python"
    ],
)
def test_every_python_block_of_a_page_runs(page: Path, number: int) -> None:
    """A reader can copy any example into a file and run it: no error, no warning."""
    result = run(blocks(page.read_text(encoding="utf-8"))[number][1])
    # Spark's launcher asks for a module that the JVM announces, and nothing can hush.
    told = result.stderr.replace("WARNING: Using incubator modules: jdk.incubator.vector\n", "")
    assert (result.returncode, told) == (0, "")
