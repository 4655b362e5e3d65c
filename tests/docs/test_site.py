"""The documentation as a site: it builds without a warning, and needs no other host."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.docs.kit import DOCS
from tests.kit.paths import ROOT

LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
"""What a browser fetches by itself, by the attribute that says from where."""


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
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    return folder


def test_every_page_is_in_the_site(site: Path) -> None:
    """Each page of docs/ is built; links, anchors and the navigation are without a fault."""
    made = {each.stem for each in site.glob("*.html")}
    assert {each.stem for each in DOCS.glob("*.md")} <= made


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


def test_the_search_index_holds_every_page(site: Path) -> None:
    """Search works without a server of its own: the index lies in the site."""
    index = (site / "search" / "search_index.json").read_text("utf-8")
    for page in DOCS.glob("*.md"):
        assert f'"{page.stem}.html' in index, page.name
