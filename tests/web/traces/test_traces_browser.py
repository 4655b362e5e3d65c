"""The pages of traces in a real browser: the search, and the waterfall of 1 to 10,000 spans."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest

from batchmill.run import Home
from batchmill.sources import endpoint_id, service_id
from batchmill.store import open_store
from batchmill.traces import SpanKeeper
from tests.kit.servers.browser import (
    Watched,
    expect_value,
    keep_shot,
    watched_page,
)
from tests.kit.traces.segments import HOUR, NOW, made_span, write_spans
from tests.web.browser.screen import FORMS, WIDE, in_every_form
from tests.web.pages_kit import serving

pytest.importorskip("playwright.sync_api")
pytest.importorskip("uvicorn")

from playwright.sync_api import expect

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.slow, pytest.mark.system]

TIME = f"from={HOUR}&to={HOUR + 3600}"
EVENT = {
    "time": HOUR * 1_000_000 + 130_000,
    "name": "exception",
    "attributes": {"exception.type": "PaymentError"},
}
CHECKOUT = [
    made_span(1, 1, at_ms=0, took_ms=400, service="gateway", name="POST /checkout"),
    made_span(1, 2, 1, at_ms=10, took_ms=80, service="cart", name="GET /cart"),
    made_span(1, 3, 2, at_ms=20, took_ms=40, service="cart", kind="CLIENT", name="SELECT carts",
              db__query__text="SELECT * FROM carts WHERE user = ?"),
    made_span(1, 4, 1, at_ms=110, took_ms=260, service="payment", name="POST /pay",
              status="ERROR", message="card refused", events=[EVENT], user__id="42"),
]  # fmt: skip
ONE = [made_span(2, 1, at_ms=5000, took_ms=3, service="cart", name="GET /health")]
MANY = [
    made_span(3, 1, at_ms=9000, took_ms=10_000, service="batch", name="import"),
    *(
        made_span(3, number, 1 if number % 10 == 2 else number - 1, at_ms=9000 + number * 0.9,
                  took_ms=5, service=f"worker-{number % 12}", name=f"item {number}")
        for number in range(2, 10_001)
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of a home in which spans are kept."""
    folder = tmp_path_factory.mktemp("traces")
    keeper = _keeper(folder)
    keeper.take(write_spans(folder, "made", [*CHECKOUT, *ONE, *MANY]))
    keeper.tend(everything=True)
    with serving(folder, f"--home={folder / 'home'}") as (address, _):
        yield address


def _keeper(folder: Path) -> SpanKeeper:
    """The keeper of a home with a store."""
    home = Home(folder / "home")
    home.prepare()
    open_store(home.store_url).close()
    return SpanKeeper(home.traces, clock=lambda: NOW)


@pytest.fixture(params=FORMS)
def seen(request: pytest.FixtureRequest, browser: Browser, address: str) -> Iterator[Watched]:
    """A page of that server, on a desk and on a phone."""
    with watched_page(browser, address, **request.param) as watched:
        yield watched


def _rows(page: Page) -> list[str]:
    """The spans that are drawn, from top to bottom."""
    lines = page.locator(".waterfall .row .line .what").all_inner_texts()
    return [re.sub(r"\s+", " ", line).strip("▾▸! ") for line in lines]


def _fits(page: Page) -> None:
    """Nothing is wider than the page."""
    widths = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert widths[0] <= widths[1]


def test_traces_are_found_and_one_is_opened(seen: Watched) -> None:
    """By service and status, from the navigation; the address has the query."""
    page = seen.open(f"#/traces?{TIME}")
    found = page.locator(".found li")
    expect(found).to_have_count(3)
    expect(page.locator(".scatter circle")).to_have_count(3)
    _fits(page)
    keep_shot(page, f"traces-{page.viewport_size['width']}")  # type: ignore[index]
    page.get_by_label("Service", exact=True).fill("payment")
    page.get_by_label("Status").select_option("error")
    page.get_by_role("button", name="Find traces").click()
    expect(found).to_have_count(1)
    expect(found).to_contain_text("gateway POST /checkout")
    expect(found).to_contain_text("1 error")
    assert "service=payment" in page.url
    assert "status=error" in page.url
    found.get_by_role("link").first.click()
    expect(page.get_by_role("heading", level=1)).to_have_text("gateway POST /checkout")


def test_links_to_the_search_fill_its_form(seen: Watched) -> None:
    """Other pages link to it with these parameters."""
    page = seen.open(
        f"#/traces?{TIME}&service=payment&name=POST+/pay&status=error&min_ms=200"
        "&attribute=user.id%3D42"
    )
    expect(page.locator(".found li")).to_have_count(1)
    for label, value in (
        ("Service", "payment"), ("Endpoint or span name", "POST /pay"),
        ("Longer than (ms)", "200"), ("Attributes", "user.id=42"),
    ):  # fmt: skip
        expect(page.get_by_label(label, exact=True)).to_have_value(value)
    page.get_by_label("Attributes").fill("user.id=43")
    page.get_by_role("button", name="Find traces").click()
    expect(page.get_by_text("No trace matches in this time range.")).to_be_visible()


def test_the_waterfall_shows_spans_errors_and_the_critical_path(seen: Watched) -> None:
    """In order, with bars at their times; what a span has opens below it."""
    page = seen.open("#/trace/1")
    expect_value(
        page,
        lambda: _rows(page),
        ["gateway POST /checkout", "cart GET /cart", "cart SELECT carts", "payment POST /pay"],
    )
    expect(page.locator(".facts")).to_contain_text("400 ms")
    _fits(page)
    bars = page.locator(".waterfall .bar")
    left = bars.nth(3).evaluate("bar => bar.style.left")
    assert left == "27.5%"
    expect(page.locator(".row.failed")).to_have_count(1)
    expect(page.locator(".critical").first).to_be_visible()
    page.get_by_label("Critical path").uncheck()
    expect(page.locator(".critical").first).to_be_hidden()
    page.get_by_label("Critical path").check()
    page.locator(".row.failed .line").click()
    details = page.locator(".details")
    for text in ("card refused", "user.id", "PaymentError", "payment-1"):
        expect(details).to_contain_text(text)
    in_every_form(page, "trace", details, page.locator(".critical").first)


def test_spans_are_folded(seen: Watched) -> None:
    """One by one, all at once, and with the keyboard."""
    page = seen.open("#/trace/1")
    root, cart, select, pay = (
        "gateway POST /checkout", "cart GET /cart", "cart SELECT carts", "payment POST /pay",
    )  # fmt: skip
    expect_value(page, lambda: len(_rows(page)), 4)
    page.get_by_role("button", name="Hide what is below").nth(1).click()
    expect_value(page, lambda: _rows(page), [root, cart, pay])
    page.get_by_role("button", name="Expand all").click()
    expect_value(page, lambda: sorted(_rows(page)), sorted([root, cart, select, pay]))
    page.get_by_role("button", name="Collapse all").click()
    expect_value(page, lambda: len(_rows(page)), 3)
    page.locator(".scroller").focus()
    page.keyboard.press("ArrowLeft")
    expect_value(page, lambda: _rows(page), [root])


def test_a_single_span_is_a_trace(seen: Watched) -> None:
    """With nothing to fold."""
    page = seen.open("#/trace/2")
    expect_value(page, lambda: _rows(page), ["cart GET /health"])
    expect(page.locator("button.toggle")).to_have_count(0)


def test_ten_thousand_spans_are_shown_a_view_at_a_time(seen: Watched) -> None:
    """The document has the rows in view only; the end is reached by scrolling, and by a search."""
    page = seen.open("#/trace/3")
    expect(page.locator(".facts")).to_contain_text("10,000")
    assert page.locator(".waterfall .row").count() < 120
    page.locator(".scroller").evaluate("box => { box.scrollTop = box.scrollHeight; }")
    expect(page.get_by_text("item 10000", exact=True)).to_be_visible()
    assert page.locator(".waterfall .row").count() < 120
    page.get_by_label("Find in this trace").fill("item 5003")
    expect(page.locator(".waterfall [role=status]")).to_have_text("1 of 10,000")
    item = page.get_by_text("item 5003", exact=True)
    expect(item).to_be_visible()
    _fits(page)
    in_every_form(page, "trace-of-10000", item)


def test_an_unknown_trace_says_why(browser: Browser, address: str) -> None:
    """It may be too old."""
    with watched_page(browser, address) as seen:
        seen.expected = ("404",)
        page = seen.open("#/trace/99")
        expect(page.get_by_role("alert")).to_contain_text("too old, or not committed yet")


def _ask_again(seen: Watched, part: str) -> None:
    """Let the time pass after which a page asks for its data again."""
    before = len(seen.requested)
    seen.page.clock.fast_forward(40_000)
    expect_value(seen.page, lambda: any(part in path for path in seen.requested[before:]), True)


def test_a_span_with_an_id_in_its_name_leads_to_its_endpoint(
    browser: Browser, tmp_path: Path
) -> None:
    """By the name that metrics have, which has a page; and to the traces of that endpoint."""
    keeper = _keeper(tmp_path)
    orders = [made_span(number, 1, name=f"GET /orders/471{number}") for number in (1, 2)]
    keeper.take(write_spans(tmp_path, "made", orders))
    with (
        serving(tmp_path, f"--home={tmp_path / 'home'}") as (address, _),
        watched_page(browser, address, WIDE) as seen,
    ):
        page = seen.open("#/trace/1")
        page.locator(".row .line").click()
        endpoint = page.locator(".details").get_by_role("link", name="GET /orders/{id}")
        id_ = endpoint_id(service_id("shop", True), "GET /orders/{id}")
        expect(endpoint).to_have_attribute(
            "href", re.compile(f"^#/endpoint/{re.escape(quote(id_))}")
        )
        page.get_by_role("link", name="Find traces with this span").click()
        expect(page.get_by_label("Endpoint or span name")).to_have_value("GET /orders/{id}")


def test_what_is_open_stays_open_while_a_trace_grows(browser: Browser, tmp_path: Path) -> None:
    """Though the rows of spans that arrive later are between those that are there."""
    keeper = _keeper(tmp_path)
    keeper.take(write_spans(tmp_path, "made", CHECKOUT))
    with (
        serving(tmp_path, f"--home={tmp_path / 'home'}") as (address, _),
        watched_page(browser, address, WIDE) as seen,
    ):
        seen.page.clock.install()
        page = seen.open("#/trace/1")
        expect_value(page, lambda: len(_rows(page)), 4)
        page.get_by_role("button", name="Hide what is below").nth(1).click()
        page.locator(".row.failed .line").click()
        expect(page.locator(".details")).to_contain_text("card refused")
        early = made_span(1, 5, 1, at_ms=1, took_ms=5, service="auth", name="check")
        keeper.take(write_spans(tmp_path, "late", [early]))
        _ask_again(seen, "/traces/1")
        expect_value(
            page,
            lambda: _rows(page),
            ["gateway POST /checkout", "auth check", "cart GET /cart", "payment POST /pay"],
        )
        expect(page.locator(".details")).to_have_count(1)
        expect(page.locator(".row.failed .details")).to_contain_text("card refused")
        expect(page.locator(".row[data-focus=yes]")).to_contain_text("POST /pay")


def test_a_trace_that_is_not_there_is_not_looked_for_for_ever(
    browser: Browser, address: str
) -> None:
    """It may be committed soon; after some time the page says that it has stopped."""
    with watched_page(browser, address) as seen:
        seen.expected = ("404",)
        seen.page.clock.install()
        page = seen.open("#/trace/99")
        alert = page.get_by_role("alert")
        expect(alert).to_contain_text("looks for it again")
        _ask_again(seen, "/traces/99")
        page.clock.fast_forward(150_000)
        expect(alert).to_contain_text("no longer looks for it")
        requested = [path for path in seen.requested if "/traces/99" in path]
        for _ in range(5):
            page.clock.run_for(40_000)
        assert [path for path in seen.requested if "/traces/99" in path] == requested
        page.get_by_role("button", name="Retry", exact=True).click()
        expect_value(
            page, lambda: sum("/traces/99" in path for path in seen.requested), len(requested) + 1
        )
        expect(alert).to_contain_text("no longer looks for it")
