"""A real Chromium for tests, driven by Playwright, and reads that wait for what the page will show.

It is Debian's: the browsers that Playwright would download are not needed. A test fails if its page
writes anything to the console, or sends a request to any host but the server.

A page changes after the call that caused it has returned. So no test reads it at once: it uses
Playwright's ``expect()`` or, for what that does not cover, :func:`expect_value`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import pytest

from tests.kit.files import ROOT

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page, Request

MISSING = "Chromium is not here: install it with `apt-get install --no-install-recommends chromium`"
WAIT_MS = 60_000
"""How long a page may take for anything before its test fails."""
T = TypeVar("T")
SHOTS = ROOT / "build" / "screenshots"
DESKTOP, PHONE = (1280, 800), (390, 844)
_FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


def find_chromium() -> str:
    """The program; without it the test is skipped, or fails in CI."""
    program = shutil.which("chromium")
    if program is None:
        if os.environ.get("CI"):
            pytest.fail(MISSING)
        pytest.skip(MISSING)
    return program


@contextlib.contextmanager
def running_chromium() -> Iterator[Browser]:
    """A browser; see :func:`find_chromium`."""
    program = find_chromium()
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=WAIT_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(_FLAGS))
        try:
            yield browser
        finally:
            browser.close()


class Watched:
    """A page, the requests it sent, and what it did that it must not do."""

    def __init__(self, page: Page, address: str) -> None:
        self.page = page
        self.address = address
        self.console: list[str] = []
        """Lines that it wrote to the console, and errors that it did not catch."""
        self.foreign: list[str] = []
        """Requests to other hosts."""
        self.expected: tuple[str, ...] = ()
        """Parts of console lines that are no failure: the test stops the server, say."""
        self.requested: list[str] = []
        """The paths, with their parameters, that were requested so far."""
        page.set_default_timeout(WAIT_MS)
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.console.append(f"uncaught: {error}"))
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
        """Fail if it wrote to the console or sent a request to another host."""
        assert not self.foreign, self.foreign
        wrong = [line for line in self.console if not any(part in line for part in self.expected)]
        assert not wrong, wrong

    def forget(self) -> None:
        """Be as new."""
        self.expected = ()
        for noted in (self.console, self.foreign, self.requested):
            noted.clear()

    def _console(self, message: ConsoleMessage) -> None:
        self.console.append(f"{message.type}: {message.text} ({message.location.get('url')})")

    def _request(self, request: Request) -> None:
        url, own = urlsplit(request.url), urlsplit(self.address)
        if (url.scheme, url.netloc) != (own.scheme, own.netloc):
            self.foreign.append(request.url)
        self.requested.append(f"{url.path}?{url.query}" if url.query else url.path)


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


@contextlib.contextmanager
def reused_page(watched: Watched) -> Iterator[Watched]:
    """A page for one of several tests, which leaves nothing in it; a new page costs far more."""
    yield watched
    watched.check()
    watched.page.evaluate("localStorage.clear(); sessionStorage.clear()")
    watched.page.goto("about:blank")
    watched.forget()


def expect_value(page: Page, read: Callable[[], T], expected: T) -> None:
    """Wait until ``read()`` returns ``expected``; fail with what it returned last."""
    deadline = time.monotonic() + WAIT_MS / 1000
    while (value := read()) != expected and time.monotonic() < deadline:
        page.wait_for_timeout(50)
    assert value == expected


def table_rows(page: Page, caption: str) -> list[list[str]]:
    """The cells of a table's rows as they are shown, read in one go once there is a row."""
    rows = page.get_by_role("table", name=caption, exact=True).locator("tbody tr")
    rows.first.wait_for()
    texts: list[list[str]] = rows.evaluate_all(
        "rows => rows.map(row => Array.from(row.querySelectorAll('th, td'),"
        " cell => cell.innerText.trim().replace(/\\s+/g, ' ')))"
    )
    return texts


def record_live_states(page: Page) -> None:
    """Note every state of the live connection from now on, for :func:`wait_for_live_state`.

    A state may be over before somebody looks.
    """
    page.evaluate(
        """() => {
            const live = document.querySelector('#live');
            window.liveStates = [];
            new MutationObserver(() => window.liveStates.push(live.dataset.state))
                .observe(live, {attributes: true, attributeFilter: ['data-state']});
        }"""
    )


def wait_for_live_state(page: Page, state: str) -> None:
    """Return once the connection has had that state, and maybe has another one by now."""
    page.wait_for_function("state => window.liveStates.includes(state)", arg=state)


def keep_shot(page: Page, name: str) -> None:
    """A screenshot among the artefacts."""
    SHOTS.mkdir(parents=True, exist_ok=True)
    # Playwright would write it on a thread of its own, and keep that.
    (SHOTS / f"{name}.png").write_bytes(page.screenshot(full_page=True))
