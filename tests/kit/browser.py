"""A real Chromium for the tests, driven by Playwright, and what it must not do.

It is Debian's: the browsers that Playwright would download are not needed. A test's page fails if
it says anything on the console, or asks any host but the server for anything.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from tests.kit.paths import ROOT

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page, Request

MISSING = "Chromium is not here: install it with `apt-get install --no-install-recommends chromium`"
WAIT_MS = 30_000
"""How long anything may take before its test fails."""
SHOTS = ROOT / "build" / "screenshots"
DESKTOP, PHONE = (1280, 800), (390, 844)
_FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


@contextlib.contextmanager
def running_chromium() -> Iterator[Browser]:
    """A browser; skipped, or in CI failed, where there is none."""
    program = shutil.which("chromium")
    if program is None:
        if os.environ.get("CI"):
            pytest.fail(MISSING)
        pytest.skip(MISSING)
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=WAIT_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(_FLAGS))
        try:
            yield browser
        finally:
            browser.close()


class Watched:
    """A page, and all that it did that it must not."""

    def __init__(self, page: Page, address: str) -> None:
        self.page = page
        self.address = address
        self.said: list[str] = []
        self.strangers: list[str] = []
        self.expected: tuple[str, ...] = ()
        """Parts of lines on the console that belong to the test: of a server that was stopped."""
        self.requested: list[str] = []
        """The paths, with their parameters, that were requested so far."""
        page.set_default_timeout(WAIT_MS)
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.said.append(f"an error: {error}"))
        page.on("request", self._request)

    def open(self, where: str = "#/services") -> Page:
        """Go to a page of the dashboard."""
        self.page.goto(f"{self.address}/{where}")
        return self.page

    def wait_for_request(self, part: str) -> None:
        """Return once a path that contains ``part`` was requested."""
        # Events are dispatched inside of Playwright's calls only: none is missed in between.
        if not any(part in path for path in self.requested):
            self.page.wait_for_event("request", lambda request: part in request.url)

    def check(self) -> None:
        """Nothing on the console, nobody else asked."""
        assert not self.strangers, self.strangers
        wrong = [line for line in self.said if not any(each in line for each in self.expected)]
        assert not wrong, wrong

    def _console(self, message: ConsoleMessage) -> None:
        self.said.append(f"{message.type}: {message.text} ({message.location.get('url')})")

    def _request(self, request: Request) -> None:
        found, own = urlsplit(request.url), urlsplit(self.address)
        if (found.scheme, found.netloc) != (own.scheme, own.netloc):
            self.strangers.append(request.url)
        self.requested.append(f"{found.path}?{found.query}" if found.query else found.path)


@contextlib.contextmanager
def watched_page(
    browser: Browser, address: str, size: tuple[int, int] = DESKTOP, **settings: Any
) -> Iterator[Watched]:
    """A page with a session of its own."""
    viewport: Any = {"width": size[0], "height": size[1]}
    context = browser.new_context(viewport=viewport, **settings)
    try:
        watched = Watched(context.new_page(), address)
        yield watched
        watched.check()
    finally:
        context.close()


def keep_shot(page: Page, name: str) -> None:
    """A screenshot among the artefacts."""
    SHOTS.mkdir(parents=True, exist_ok=True)
    # Playwright would write it on a thread of its own, and keep that.
    (SHOTS / f"{name}.png").write_bytes(page.screenshot(full_page=True))
