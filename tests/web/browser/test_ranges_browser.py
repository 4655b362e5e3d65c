"""How a person chooses what time the pages show: by dragging, steps, comparing, and addresses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.kit.servers.browser import Watched, expect_value, watched_page
from tests.web.browser.home import BEGIN, PAGES, full_home
from tests.web.browser.screen import FORMS, PHONE_DARK, WIDE_LIGHT, in_every_form
from tests.web.pages_kit import serving

pytest.importorskip("playwright.sync_api")
pytest.importorskip("uvicorn")

from playwright.sync_api import expect

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.slow(30), pytest.mark.system]

HOUR = f"from={BEGIN}&to={BEGIN + 3600}&grain=minute"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of a run's folder that has something for every page."""
    folder = tmp_path_factory.mktemp("ranges")
    home = full_home(folder)
    with serving(folder, f"--home={home.folder}") as (served, _):
        yield served


@pytest.fixture(params=FORMS)
def seen(request: pytest.FixtureRequest, browser: Browser, address: str) -> Iterator[Watched]:
    """A page of that server, on a desk and on a phone."""
    with watched_page(browser, address, **request.param) as watched:
        yield watched


def drag(page: Page, begin: tuple[float, float], end: tuple[float, float]) -> None:
    """Move a finger, or the mouse where there is no touch screen, pressed over the page."""
    path = [
        tuple(one + (other - one) * step / 8 for one, other in zip(begin, end, strict=True))
        for step in range(9)
    ]
    if not page.evaluate("navigator.maxTouchPoints"):
        page.mouse.move(*begin)
        page.mouse.down()
        for x, y in path[1:]:
            page.mouse.move(x, y)
        page.mouse.up()
        return
    session = page.context.new_cdp_session(page)
    for place, (x, y) in enumerate(path):
        given = {"type": "touchMove" if place else "touchStart", "touchPoints": [{"x": x, "y": y}]}
        session.send("Input.dispatchTouchEvent", given)
    session.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    session.detach()


def first_chart(page: Page) -> Any:
    """Where the first chart of the page is, once it is drawn, in the middle of the screen."""
    over = page.locator(".chart .u-over").first
    over.wait_for()
    page.locator("main[aria-busy]").wait_for(state="detached")
    over.evaluate("over => over.scrollIntoView({block: 'center'})")
    return over.bounding_box()


@pytest.mark.parametrize("name", ["service", "explore"])
def test_dragging_over_a_chart_zooms_and_back_returns(seen: Watched, name: str) -> None:
    """With the mouse and with a finger: all charts show the selected minutes.

    Each choice is an entry of the history.
    """
    page = seen.open(f"#/{PAGES[name]}?{HOUR}")
    area = first_chart(page)
    left, width, top = area["x"], area["width"], area["y"]
    drag(page, (left + width * 0.25, top + 40), (left + width * 0.5, top + 50))
    expect(page).not_to_have_url(re.compile(f"from={BEGIN}&"))
    match = re.search(r"from=(\d+)&to=(\d+)", page.url)
    assert match
    begin, end = int(match[1]), int(match[2])
    assert abs(begin - (BEGIN + 15 * 60)) <= 120
    assert 13 * 60 <= end - begin <= 18 * 60
    seen.wait_for_request(f"from={begin}&to={end}")
    page.get_by_label("Step").select_option("5m")
    expect(page).to_have_url(re.compile("grain=5m"))
    page.go_back()
    expect(page.get_by_label("Step")).to_have_value("minute")
    page.go_back()
    expect(page).to_have_url(re.compile(f"from={BEGIN}&to={BEGIN + 3600}"))
    page.go_forward()
    expect(page).to_have_url(re.compile(f"from={begin}&to={end}"))


def test_a_finger_that_moves_up_on_a_chart_scrolls_the_page(browser: Browser, address: str) -> None:
    """Nothing is selected, and the range stays."""
    with watched_page(browser, address, **PHONE_DARK) as seen:
        page = seen.open(f"#/{PAGES['service']}?{HOUR}")
        area = first_chart(page)
        before = page.evaluate("window.scrollY")
        x, y = area["x"] + area["width"] / 2, area["y"] + area["height"] - 10
        drag(page, (x, y), (x + 5, y - 150))
        expect_value(page, lambda: page.evaluate("window.scrollY") > before + 50, True)
        selected = page.locator(".chart .u-select").first
        expect_value(page, lambda: selected.evaluate("box => box.clientWidth"), 0)
        assert f"from={BEGIN}&to={BEGIN + 3600}" in page.url


@pytest.mark.parametrize(
    ("step", "rows", "form"),
    [
        ("5m", 12, WIDE_LIGHT),
        ("5m", 12, PHONE_DARK),
        ("10m", 6, PHONE_DARK),
        ("hour", 1, WIDE_LIGHT),
    ],
)
def test_steps_of_minutes(
    browser: Browser, address: str, step: str, rows: int, form: dict[str, Any]
) -> None:
    """5, 10 and 60 minutes a point; load stays per minute."""
    with watched_page(browser, address, **form) as seen:
        page = seen.open(f"#/{PAGES['service']}?{HOUR}")
        page.get_by_label("Step").select_option(step)
        expect(page).to_have_url(re.compile(f"grain={step}"))
        page.get_by_text("Values as a table").click()
        values = page.get_by_role("table", name="Values over time").locator("tbody tr")
        expect(values).to_have_count(rows)
        expect(values.first.locator("td").first).to_have_text("2.0", use_inner_text=True)


def test_a_range_is_compared_with_the_time_before(browser: Browser, address: str) -> None:
    """A dashed line and a number for the earlier time; the address says so."""
    with watched_page(browser, address, **WIDE_LIGHT) as seen:
        second = f"from={BEGIN + 1800}&to={BEGIN + 3600}"
        page = seen.open(f"#/{PAGES['service']}?{second}")
        page.get_by_label("Compare with").select_option("before")
        expect(page).to_have_url(re.compile("compare=before"))
        seen.wait_for_request(f"from={BEGIN}&to={BEGIN + 1800}")
        expect(page.locator("dl.tiles .why").first).to_have_text("2.0 before")
        legend = page.locator(".chart").first.locator(".u-legend")
        expect(legend).to_contain_text("before")
        in_every_form(page, "compared", legend.get_by_text("before"))


def test_relative_ranges_in_an_address(seen: Watched) -> None:
    """Any length up to now, and addresses of older versions."""
    page = seen.open("#/services?from=now-5h")
    seen.wait_for_request("from=now-5h&to=now")
    expect(page.get_by_role("radio", name="5h")).to_be_checked()
    expect(page.locator("table.services tbody tr")).to_have_count(2)
    seen.open("#/services?range=24h")
    seen.wait_for_request("from=now-24h&to=now")
    expect(page.get_by_role("radio", name="24h")).to_be_checked()
