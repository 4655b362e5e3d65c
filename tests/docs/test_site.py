"""The documentation as a site: it builds without a warning, and needs no other host."""

from __future__ import annotations

import importlib
import pkgutil
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import batchmill
from tests.docs.kit import DOCS
from tests.kit.files import ROOT
from tests.kit.threads import PATIENCE_S

LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
"""What a browser fetches by itself, by the attribute that says from where."""
NOT_FOR_USERS = {"cli", "demo", "http", "run", "spans"}
"""Packages whose names other packages of batchmill use, and nobody else."""
MARKDOWN = (*ROOT.glob("*.md"), *DOCS.rglob("*.md"), ROOT / "deploy" / "README.md")


class Fetched(HTMLParser):
    """The addresses that a page has a browser fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what it fetches."""
        address = dict(attrs).get(LOADED.get(tag, ""))
        if address:
            self.addresses.append(address)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it: strictly."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    return folder


@pytest.mark.system
def test_every_page_is_in_the_site(site: Path) -> None:
    """Each page of docs/ is built; links, anchors and the navigation are without a fault."""
    made = {path.stem for path in site.glob("*.html")}
    assert {path.stem for path in DOCS.glob("*.md")} <= made


@pytest.mark.system
def test_no_page_fetches_anything_from_another_host(site: Path) -> None:
    """Scripts, styles, fonts and images all lie in the site."""
    for page in site.rglob("*.html"):
        fetched = Fetched()
        fetched.feed(page.read_text("utf-8"))
        assert fetched.addresses, page.name
        for address in fetched.addresses:
            assert not re.match(r"([a-z]+:)?//", address), f"{page.name} fetches {address}"
    for style in site.rglob("*.css"):
        text = style.read_text("utf-8")
        assert not re.search(r"(@import|url\()\s*['\"]?(https?:)?//", text), style.name


@pytest.mark.system
def test_the_search_index_holds_every_page(site: Path) -> None:
    """Search works without a server of its own: the index lies in the site."""
    index = (site / "search" / "search_index.json").read_text("utf-8")
    for page in DOCS.glob("*.md"):
        assert f'"{page.stem}.html' in index, page.name


REFERENCE = {page.stem: page for page in (DOCS / "reference").glob("*.md")}


def test_every_package_has_a_page_of_the_api_reference() -> None:
    """Those that others may use: the packages, and the modules that are public by themselves."""
    packages = {
        module.name
        for module in pkgutil.iter_modules(batchmill.__path__)
        if hasattr(importlib.import_module(f"batchmill.{module.name}"), "__all__")
    }
    assert packages - NOT_FOR_USERS <= REFERENCE.keys()


@pytest.mark.system
@pytest.mark.parametrize("name", sorted(REFERENCE))
def test_the_api_reference_has_every_public_name(site: Path, name: str) -> None:
    """Each name in a package's ``__all__`` has its own heading, made from its docstring."""
    page = (site / "reference" / f"{name}.html").read_text("utf-8")
    module = importlib.import_module(f"batchmill.{name}")
    names = set(getattr(module, "__all__", ())) - {"strategies"}  # a module of its own
    missing = {public for public in names if not re.search(rf'id="[\w.]*\b{public}"', page)}
    assert not missing


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda page: page.name)
def test_prose_wraps_at_100_columns(page: Path) -> None:
    """Lines of prose; tables, code and a link that is longer by itself may exceed it."""
    code = False
    for number, line in enumerate(page.read_text("utf-8").splitlines(), 1):
        if line.lstrip().startswith("```"):
            code = not code
        elif not code and len(line) > 100 and not line.startswith(("|", "![", "<")):
            assert " " not in line.strip(), f"{page.name}:{number} has {len(line)} columns"
