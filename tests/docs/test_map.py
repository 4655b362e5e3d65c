"""The map of the code names files that exist, and every package."""

from __future__ import annotations

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
