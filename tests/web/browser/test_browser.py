"""The pages in a real browser, in front of a real server and a store whose numbers are known."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from batchmill.files import write_json
from batchmill.http import Access
from batchmill.run import Home, StatusReader
from batchmill.store import open_store
from tests.kit.servers.browser import (
    PHONE,
    Watched,
    expect_value,
    keep_shot,
    record_live_states,
    reused_page,
    table_rows,
    wait_for_live_state,
    watched_page,
)
from tests.web.browser.home import ingest_status, progress_status
from tests.web.browser.screen import FORMS, in_every_form
from tests.web.kit import serving as serving_here
from tests.web.pages_kit import BEGIN, OWN, SLOWEST, Served, filled_store, serving
from tests.web.traffic import CORE, WITHOUT_MICROS, Call, Shop

pytest.importorskip("playwright.sync_api")
pytest.importorskip("uvicorn")

from playwright.sync_api import expect

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

pytestmark = pytest.mark.slow

PAGES = {
    "services": f"#/services?{OWN}",
    "service": f"#/service/cart?{OWN}",
    "topology": f"#/topology?{OWN}",
    "explore": f"#/explore?{OWN}",
    "traces": f"#/traces?{OWN}",
    "alerts": f"#/alerts?{OWN}",
    "pipeline": "#/pipeline",
}


NONE = "\N{EN DASH}"
"""A side that does not report."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server on a store with known calls; it knows of a run's folder in which nothing runs."""
    folder = tmp_path_factory.mktemp("web")
    with filled_store(folder) as (url, store, shop):
        home = f"--home={folder / 'home'}"
        with serving(folder, f"--store={url}", home) as (address, life):
            yield Served(address, life, store, shop)


@pytest.fixture(scope="module")
def tab(browser: Browser, served: Served) -> Iterator[Watched]:
    """A page of that server."""
    with watched_page(browser, served.address) as watched:
        yield watched


@pytest.fixture
def seen(tab: Watched) -> Iterator[Watched]:
    """That page, as if it were new."""
    with reused_page(tab) as watched:
        yield watched


def expect_table(page: Page, caption: str, expected: dict[str, list[str]]) -> None:
    """Wait until the table has these rows: the cells by the text of the first one."""
    expect_value(
        page, lambda: {first: rest for first, *rest in table_rows(page, caption)}, expected
    )


def services(page: Page) -> Locator:
    """The names of the services, in the order they are shown in."""
    return page.locator("table.services tbody th a")


def expect_services(page: Page, *names: str) -> None:
    """Wait until these services are shown, in this order."""
    expect(services(page)).to_have_text(names, use_inner_text=True)


def test_the_overview_shows_the_numbers_of_the_store(seen: Watched) -> None:
    """Calls a minute, average, p99, success and apdex of an hour, each with a line."""
    page = seen.open(PAGES["services"])
    expected = {
        "shop": ["10", "30 ms", "40 ms", "99.00 %", "0.99"],
        "cart": ["5.0", "700 ms", "696 ms", "100.00 %", "0.50"],
    }
    expect_table(page, "Services", expected)
    lines = page.locator("table.services .spark .line")
    expect(lines).to_have_count(10)
    for number in range(2):
        expect(lines.nth(number)).to_have_attribute("d", re.compile("^[^L]*(L[^L]*){59}$"))
    keep_shot(page, "overview")


@pytest.mark.parametrize(
    ("script", "shown"),
    [
        pytest.param(CORE, ["0.51 ms", "0.90 ms"], id="microseconds"),
        pytest.param(WITHOUT_MICROS, ["< 1 ms", "< 10 ms"], id="milliseconds only"),
    ],
)
def test_a_fast_service_is_not_shown_as_0_ms(
    browser: Browser, tmp_path: Path, script: str, shown: list[str]
) -> None:
    """Calls of 120 to 900 µs; a store without the metrics in µs says what it knows."""
    url = f"sqlite:///{tmp_path}/store.db"
    with open_store(url) as store:
        shop = Shop(store, script=script)
        shop.commit([Call("fast", ms, BEGIN) for ms in (0.12, 0.9)])
    with serving_here(url) as server, watched_page(browser, server.address) as seen:
        page = seen.open(PAGES["services"])
        expect_table(page, "Services", {"fast": ["2.0", *shown, "100.00 %", "1.00"]})
        page = seen.open(f"#/service/fast?{OWN}")
        tiles = page.locator("dl.tiles dd")
        expect(tiles.nth(1)).to_have_text(shown[0])
        expect(tiles.nth(2)).to_have_text(shown[1])
        in_every_form(page, f"fast-{len(script)}", tiles.nth(1), tiles.nth(2))


def test_services_are_sorted_by_a_button_in_each_header(seen: Watched) -> None:
    """With the keyboard; the header says how, the address too, and the button keeps the focus."""
    page = seen.open(PAGES["services"])
    expect_services(page, "shop", "cart")
    page.get_by_role("button", name="Average").focus()
    page.keyboard.press("Enter")
    expect_services(page, "cart", "shop")
    head = page.get_by_role("columnheader", name="Average")
    expect(head).to_have_attribute("aria-sort", "descending")
    page.keyboard.press("Enter")
    expect_services(page, "shop", "cart")
    expect(head).to_have_attribute("aria-sort", "ascending")
    expect(page).to_have_url(re.compile("sort=avg&order=asc"))
    page.reload()
    expect_services(page, "shop", "cart")
    expect(head).to_have_attribute("aria-sort", "ascending")


def test_services_are_searched_by_name(seen: Watched) -> None:
    """As one types; what is not there is said."""
    page = seen.open(PAGES["services"])
    expect_services(page, "shop", "cart")
    search = page.get_by_role("searchbox", name="Search services")
    search.press_sequentially("CAR")
    page.get_by_text("1 service", exact=True).wait_for()
    expect_services(page, "cart")
    search.fill("nobody")
    page.get_by_text("No service with “nobody” in its name").wait_for()
    expect(search).to_be_focused()


def test_the_range_and_the_grain_are_requested(seen: Watched) -> None:
    """By radio buttons and a list; a grain that would give too many buckets cannot be chosen."""
    page = seen.open("#/services")
    page.get_by_text("No service was called in this time range.").wait_for()
    page.get_by_role("radio", name="6h").check()
    seen.wait_for_request("from=now-6h&to=now&grain=auto")
    expect_services(page, "shop", "cart")
    page.get_by_label("Step").select_option("hour")
    expect(page).to_have_url(re.compile("grain=hour"))
    seen.wait_for_request("from=now-6h&to=now&grain=hour")
    page.get_by_role("radio", name="30d").check()
    expect(page.get_by_label("Step").locator("option[value=minute]")).to_be_disabled()
    expect(page).to_have_url(re.compile("from=now-30d"))
    seen.wait_for_request("from=now-30d")
    expect_services(page, "shop", "cart")


def test_a_range_of_ones_own(seen: Watched) -> None:
    """From and to, in local time."""
    page = seen.open("#/services")
    page.get_by_role("radio", name="Custom").check()
    local = "seconds => new Date(seconds * 1000 - new Date().getTimezoneOffset() * 60000)"
    begin, end = (
        str(page.evaluate(f"({local})({at}).toISOString().slice(0, 16)"))
        for at in (BEGIN, BEGIN + 3600)
    )
    page.get_by_label("From, UTC").fill(begin)
    page.get_by_label("To, UTC").fill(end)
    page.get_by_role("button", name="Show", exact=True).click()
    shop = page.locator("table.services tbody tr", has_text="shop")
    expect(shop.locator("td").first).to_have_text("10", use_inner_text=True)
    expect(page).to_have_url(re.compile(f"from={BEGIN}&to={BEGIN + 3600}"))


def test_a_service_has_its_charts_and_parts(seen: Watched) -> None:
    """Endpoints, instances, both kinds of relations, statements with counts; values as a table."""
    page = seen.open(PAGES["services"])
    page.get_by_role("link", name="cart", exact=True).click()
    page.get_by_role("heading", name="cart", level=1).wait_for()
    figures = ["5.0", "700 ms", "696 ms", "100.00 %"]
    expect_table(page, "Endpoints", {"POST /cart": figures})
    expect_table(page, "Instances", {"cart-1": figures})
    called = ["5.0", "700 ms", "700 ms", "100.00 %", "100.00 %", "Details"]
    expect_table(page, "Called by", {"shop": called})
    expect_table(page, "Calls", {"orders-db": ["2.0", "5 ms", NONE, "100.00 %", NONE, "Details"]})
    expect_value(
        page,
        lambda: [row[:5] for row in table_rows(page, "Slow statements")],
        [[SLOWEST, "orders-db", "900 ms", "7", "6.30 s"]],
    )
    expect(page.locator(".chart canvas")).to_have_count(5)
    page.get_by_text("Values as a table").click()
    values = page.get_by_role("table", name="Values over time").locator("tbody tr")
    expect(values).to_have_count(60)
    expected = ["5.0", "700 ms", *["696 ms"] * 5, "100.00 %", "0.50"]
    expect(values.first.locator("td")).to_have_text(expected, use_inner_text=True)
    in_every_form(page, "service-values", values.first)


def test_the_map_and_its_table_say_who_calls_whom(seen: Watched) -> None:
    """Each service a box that leads to its page, each relation a line; the same as a table."""
    page = seen.open(PAGES["topology"])
    expected = [
        ["shop", "cart", "5.0", *["700 ms"] * 2, *["696 ms"] * 2, *["100.00 %"] * 2, "Details"],
        ["cart", "orders-db", "2.0", "5 ms", NONE, "5.0 ms", NONE, "100.00 %", NONE, "Details"],
    ]
    expect_value(page, lambda: table_rows(page, "Calls between services"), expected)
    left_to_right = """nodes => nodes
        .sort((a, b) => a.getBoundingClientRect().x - b.getBoundingClientRect().x)
        .map(node => node.querySelector('text').textContent)"""
    boxes = page.locator(".map a.node")
    # A caller stands left of what it calls.
    expect_value(page, lambda: boxes.evaluate_all(left_to_right), ["shop", "cart", "orders-db"])
    expect(page.locator(".map .edge")).to_have_count(2)
    keep_shot(page, "topology")
    page.locator(".map a.node", has_text="cart").focus()
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="cart", level=1).wait_for()


def test_a_commit_shows_by_itself(seen: Watched, served: Served) -> None:
    """Without a reload; the sort, the focus and where one has scrolled to stay."""
    page = seen.open("#/services?sort=name&order=asc")
    page.locator("#live[data-state=live]").wait_for()
    page.get_by_text("No service was called in this time range.").wait_for()
    now = int(time.time())
    many = [Call(f"s{n:02}", 30, now) for n in range(40)]
    served.shop.commit(many)
    page.get_by_text("40 services", exact=True).wait_for()
    page.get_by_role("link", name="s30").focus()
    page.evaluate("window.scrollTo(0, 500)")
    page.evaluate("document.querySelector('table.services').dataset.same = 'yes'")
    served.shop.commit([*many, *(Call("a-new-one", 50, now, ok=False) for _ in range(30))])
    page.get_by_text("41 services", exact=True).wait_for()
    expect(services(page).nth(0)).to_have_text("a-new-one")
    expect(services(page).nth(1)).to_have_text("s00")
    expect(page.get_by_role("link", name="s30")).to_be_focused()
    expect(page.locator("table.services")).to_have_attribute("data-same", "yes")
    # But for the row that came in above.
    near = "Math.abs(window.scrollY - 500) < 80"
    expect_value(page, lambda: page.evaluate(near), True)
    head = page.get_by_role("columnheader", name="Service")
    expect(head).to_have_attribute("aria-sort", "ascending")


def test_the_theme_is_chosen_and_remembered(browser: Browser, served: Served) -> None:
    """The switch wins over the system."""
    with watched_page(browser, served.address, PHONE, color_scheme="dark") as seen:
        page = seen.open(PAGES["services"])
        body, theme = page.locator("body"), page.get_by_label("Theme")
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
        theme.select_option("light")
        expect(body).not_to_have_css("background-color", dark)
        page.reload()
        expect(body).not_to_have_css("background-color", dark)
        expect(theme).to_have_value("light")


def test_everything_is_reached_with_the_tab_key(seen: Watched) -> None:
    """First the link over the head, then the pages, the range, the table; and out again."""
    page = seen.open(PAGES["services"])
    expect_services(page, "shop", "cart")
    passed = []
    for _ in range(40):
        page.keyboard.press("Tab")
        passed.append(
            page.evaluate(
                "(({tagName, textContent, value, ariaLabel}) => tagName === 'BODY' ? '' : "
                "(ariaLabel || textContent || value).trim())(document.activeElement)"
            )
        )
        assert page.evaluate(
            "document.activeElement.matches(':focus-visible, [type=datetime-local], body')"
        ), passed[-1]
    wanted = ["Skip to content", "Topology", "Search services", "Average", "cart", "API"]
    places = [passed.index(label) for label in wanted]
    assert places == sorted(places)
    assert "" in passed, "the focus leaves the page at its end"
    page.get_by_text("Skip to content").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#main")).to_be_focused()


def test_what_is_not_there_is_said(seen: Watched) -> None:
    """A service that nobody knows, with the names that come near; a page that there is not."""
    seen.expected = ("404",)
    page = seen.open("#/service/crat")
    page.get_by_role("alert").get_by_text("cart").wait_for()
    page.get_by_role("link", name="All services").click()
    page.get_by_role("heading", name="Services", level=1).wait_for()
    page = seen.open("#/nothing")
    page.get_by_text("There is no page “nothing”").wait_for()
    page = seen.open("nothing/more")
    page.get_by_role("heading", name="There is no page “/nothing/more”").wait_for()
    page.get_by_role("link", name="All services").click()
    page.get_by_role("heading", name="Services", level=1).wait_for()


def test_the_pipeline_page_says_that_nothing_runs(seen: Watched) -> None:
    """A run's folder that nobody uses: down, and what to do about it."""
    page = seen.open(PAGES["pipeline"])
    page.locator(".reasons", has_text="nothing runs: start batchmill run").wait_for()
    expect(page.locator(".verdict")).to_have_text("Down", use_inner_text=True)
    page.get_by_text("No micro-batch yet").wait_for()
    expect(page.locator(".stage")).to_have_count(6)


def test_the_pipeline_page_shows_what_a_run_tells(browser: Browser, tmp_path: Path) -> None:
    """Partitions, threads, moves, thresholds, batches by phase, drops; and what is new each second.

    Ingest is this process, as far as anybody can tell.
    """
    home = Home(tmp_path / "home")
    home.prepare()
    write_json(home.ingest, ingest_status(received=1000))
    home.checkpoint.mkdir(exist_ok=True)
    write_json(home.progress, progress_status())
    segment = home.spool / "Span" / f"{10**15}-00000000-1500000.parquet"
    segment.parent.mkdir()
    segment.touch()
    os.utime(segment, (1e9, 1e9))
    with (
        serving_here(home.store_url, run=StatusReader(home)) as server,
        watched_page(browser, server.address) as seen,
    ):
        seen.expected = ("503",)  # there is no store
        page = seen.open(PAGES["pipeline"])
        queue = page.locator("article.queue", has_text="EVENTS")
        queue.wait_for()
        heat = "cells => cells.map(cell => cell.dataset.heat)"
        expect_value(
            page,
            lambda: queue.locator(".cell").evaluate_all(heat),
            ["0", "1", "2", "3", "4", *"0" * 35],
        )
        summary = "40 partitions, 4 in use, the fullest 95 %"
        expect(queue.locator(".heat")).to_have_attribute("aria-label", summary)
        threads = ["thread 0 25 %", "thread 1 75 %"]
        expect(queue.locator(".threads li")).to_have_text(threads, use_inner_text=True)
        expect(queue).to_contain_text("14 moves by the balancer; last: 05:04:10 partition 3")
        expect(queue).to_contain_text("90 accepted, refused: 3 full")
        flows = page.locator("article.queue", has_text="orders")
        expect(flows).to_contain_text("flow dispatcher of ingest")
        expect(flows).to_contain_text("12 flows active, 345 assigned, 333 completed; 7 accepted")
        summary = "2 workers, 1 in use, the fullest 30 %"
        expect(flows.locator(".heat")).to_have_attribute("aria-label", summary)
        level = page.locator(".gauge", has_text="Ingest: jdbc")
        expect(level).to_contain_text("critical from 120")
        expect(level).to_contain_text("decided: 4 critical reject")
        expect(level.locator(".fill.bad")).to_have_count(1)
        gauge = page.locator(".gauge", has_text="Unread bytes")
        expect(gauge).to_contain_text("300 MiB")
        expect(gauge.locator(".fill.warn")).to_have_count(1)
        expect(page.locator(".back strong")).to_have_text("WARNING")
        backlog = page.locator(".stage", has_text="Spool")
        expect(backlog).to_contain_text("Behind1.50 M spans")
        expect(backlog).to_contain_text("Caught upin 4.2 min")
        expect(backlog).to_contain_text("New data waits6.2 s")
        expect(page.locator(".stage", has_text="Spark")).to_contain_text("Running№ 2 for 12 min")
        expect(page.locator(".bars g")).to_have_count(2)
        legend = "read 1.0 s commit 500 ms"
        expect(page.locator(".legend")).to_have_text(legend, use_inner_text=True)
        expected = {
            "rejected spans": ["no trace id", "12"],
            "duplicates": ["delivered again", "7"],
        }
        expect_table(page, "Dropped and refused", expected)
        expect_table(page, "Requests", {"http": ["ok", "40"]})
        worst = ["Endpoint", "412", "5,000", "GET /aqzrt"]
        expect_table(page, "Too many new names", {"endpoints of shop": worst})
        number = page.locator(".stage", has_text="OTLP").locator("dd").nth(1)
        expect(number).to_have_text("1,000")
        write_json(home.ingest, ingest_status(received=2500))
        page.locator(".stage dd", has_text="2,500").first.wait_for()
        keep_shot(page, "pipeline-status")


def test_a_token_is_entered_once(browser: Browser, tmp_path: Path) -> None:
    """A wrong one is told; the right one is kept for the tab's session, and can be forgotten.

    The store does not exist yet, and the server has no run: the page shows both.
    """
    url, access = f"sqlite:///{tmp_path}/none.db", Access(token="sesame")
    with (
        serving_here(url, access=access) as server,
        watched_page(browser, server.address) as seen,
    ):
        seen.expected = ("401", "503")
        page = seen.open("#/services")
        page.get_by_text("This server requires a token").wait_for()
        field = page.get_by_label("Token")
        field.fill("wrong")
        field.press("Enter")
        page.get_by_text("The token was refused.").wait_for()
        field.fill("sesame")
        field.press("Enter")
        page.locator("#live[data-state=live]").wait_for()
        page.get_by_role("alert").get_by_text(re.compile("none.db")).first.wait_for()
        page.reload()
        page.locator("#live[data-state=live]").wait_for()
        seen.open(PAGES["pipeline"])
        page.get_by_text("this server has no run").wait_for()
        page.get_by_role("button", name="Forget token").click()
        page.get_by_text("This server requires a token").wait_for()
        assert not any("sesame" in path for path in seen.requested)


def test_an_empty_store_says_how_to_fill_it(browser: Browser, tmp_path: Path) -> None:
    """And the first commit shows by itself."""
    url = f"sqlite:///{tmp_path}/store.db"
    with (
        open_store(url) as store,
        serving_here(url) as server,
        watched_page(browser, server.address) as seen,
    ):
        page = seen.open("#/services")
        page.get_by_text("No data yet").wait_for()
        page.get_by_text("batchmill run --demo").wait_for()
        Shop(store).commit([Call("first", 30, int(time.time()))])
        expect_services(page, "first")


@pytest.mark.system
@pytest.mark.parametrize("form", FORMS)
def test_back_returns_to_where_one_was(
    browser: Browser, served: Served, form: dict[str, Any]
) -> None:
    """A new page begins at its top; Back, Forward and a reload return to where one had scrolled."""
    with watched_page(browser, served.address, **form) as watched:
        page = watched.open(f"#/service/cart?{OWN}")
        page.get_by_role("link", name="POST /cart").first.wait_for()
        scroll: Callable[[], int] = partial(page.evaluate, "window.scrollY")
        page.evaluate("window.scrollTo(0, 700)")
        # Not by a click of the mouse, for which Playwright scrolls.
        page.get_by_role("link", name="POST /cart").first.evaluate("(link) => link.click()")
        expect(page.get_by_role("heading", level=1)).to_have_text("POST /cart")
        expect_value(page, scroll, 0)
        page.locator(".chart canvas").first.wait_for()
        page.evaluate("window.scrollTo(0, 300)")
        expect_value(page, lambda: page.evaluate("history.state?.scroll"), 300)
        page.go_back()
        expect(page.get_by_role("heading", level=1)).to_have_text("cart")
        expect_value(page, scroll, 700)
        page.go_forward()
        expect_value(page, scroll, 300)
        page.reload()
        expect(page.get_by_role("heading", level=1)).to_have_text("POST /cart")
        expect_value(page, scroll, 300)


@pytest.mark.system
def test_a_server_that_goes_and_comes_back(browser: Browser, tmp_path: Path) -> None:
    """The page says so, keeps what it shows, and is live again without a reload."""
    with (
        filled_store(tmp_path) as (url, _, shop),
        serving(tmp_path, f"--store={url}") as (address, life),
        watched_page(browser, address) as seen,
    ):
        seen.expected = ("net::ERR_",)
        page = seen.open(PAGES["services"])
        expect_services(page, "shop", "cart")
        page.locator("#live[data-state=live]").wait_for()
        record_live_states(page)
        os.kill(life.pid, signal.SIGTERM)
        life.end(0)
        wait_for_live_state(page, "reconnecting")
        expect_services(page, "shop", "cart")
        page.locator("#live[data-state=down]").wait_for()
        page.get_by_text(re.compile("No live updates since .*: the server does not")).wait_for()
        shop.commit([Call("third", 30, BEGIN)])
        port = address.rpartition(":")[2]
        with serving(tmp_path, f"--store={url}", f"--port={port}"):
            page.get_by_role("button", name="Retry now").click()
            page.locator("#live[data-state=live]").wait_for()
            page.get_by_text("3 services", exact=True).wait_for()
            page.get_by_text("No live updates since").wait_for(state="detached")
