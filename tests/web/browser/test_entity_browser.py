"""The pages of entities, the explorer and the map in a real browser, over a shop that is known."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

import pytest

from batchmill.sources import endpoint_id, instance_id
from tests.kit.servers.browser import (
    PHONE,
    Watched,
    expect_value,
    keep_shot,
    running_chromium,
    table_rows,
    watched_page,
)
from tests.web.entities_kit import (
    CACHE,
    CHECKOUT,
    DATABASE,
    GATEWAY,
    QUEUE,
    STATEMENT,
    TRACE,
    write_shop,
)
from tests.web.pages_kit import serving

pytest.importorskip("playwright.sync_api")
pytest.importorskip("uvicorn")

from playwright.sync_api import expect

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.slow(45), pytest.mark.system]

WIDE = (1440, 900)
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
BEGIN = int(time.time()) // 3600 * 3600 - 2 * 3600
"""The hour that the shop is open; it is over."""
HOUR = f"from={BEGIN}&to={BEGIN + 3600}&grain=minute"
ENDPOINT, INSTANCE = endpoint_id(CHECKOUT, "POST /checkout"), instance_id(CHECKOUT, "checkout-1")
PAGES = {
    "service": f"service/{quote(CHECKOUT)}",
    "endpoint": f"endpoint/{quote(ENDPOINT)}",
    "instance": f"instance/{quote(INSTANCE)}",
    "database": f"database/{quote(DATABASE)}",
    "cache": f"cache/{quote(CACHE)}",
    "queue": f"queue/{quote(QUEUE)}",
    "relation": f"relation/{quote(GATEWAY)}-{quote(CHECKOUT)}",
    "explore": "explore",
    "topology": "topology",
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for all tests; each has a session of its own."""
    with running_chromium() as chromium:
        yield chromium


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server over the shop."""
    folder = tmp_path_factory.mktemp("entities")
    url = f"sqlite:///{folder}/store.db"
    write_shop(url, BEGIN)
    with serving(folder, f"--store={url}") as (served, _):
        yield served


@pytest.fixture
def seen(browser: Browser, address: str) -> Iterator[Watched]:
    """A page of that server, as wide as a laptop's screen."""
    with watched_page(browser, address, WIDE) as watched:
        yield watched


def heading(page: Page, name: str) -> None:
    """Wait for the page of that name."""
    page.get_by_role("heading", name=name, level=1, exact=True).wait_for()


def tiles(page: Page, group: int = 0) -> list[str]:
    """The numbers of a group's tiles."""
    shown = page.locator("section.group").nth(group).locator("dl.tiles dd")
    return [text.strip() for text in shown.all_inner_texts()]


def go(page: Page, table: str, name: str) -> None:
    """Follow a link of a table."""
    page.get_by_role("table", name=table, exact=True).get_by_role("link", name=name).first.click()


def test_every_list_leads_to_the_page_of_what_it_names(seen: Watched) -> None:
    """Endpoint, instance, relation, database, cache, queue and topic, and back by the trail."""
    page = seen.open(f"#/{PAGES['service']}?{HOUR}")
    heading(page, "checkout")
    expect_value(page, lambda: tiles(page), ["2.0", "20 ms", "30 ms", "100.00 %", "1.00"])
    go(page, "Endpoints", "POST /checkout")
    heading(page, "POST /checkout")
    expect_value(page, lambda: tiles(page), ["2.0", "20 ms", "30 ms", "100.00 %"])
    go(page, "Called by", "Details")
    expect(page.locator(".names .tag").first).to_have_text("Calls between endpoints")
    page.get_by_role("link", name="POST /checkout").click()
    heading(page, "POST /checkout")
    page.locator(".trail").get_by_role("link", name="checkout", exact=True).click()
    go(page, "Instances", "checkout-1")
    heading(page, "checkout-1")
    page.go_back()
    heading(page, "checkout")
    go(page, "Called by", "Details")
    both = page.locator("section.group h2.group-title")
    sides = ["Calls, as the caller reports them", "Calls, as the callee reports them"]
    expect(both).to_have_text(sides)
    expect_value(page, lambda: [tiles(page, side)[-1] for side in (0, 1)], ["95.00 %", "100.00 %"])
    page.go_back()
    go(page, "Calls", "orders-db")
    expect(page.locator(".names .tag").first).to_have_text("Database")
    expect_value(page, lambda: tiles(page)[:2], ["3.0", "5 ms"])
    assert table_rows(page, "Slow statements")[0][:3] == [STATEMENT, "orders-db", "900 ms"]
    trace = page.get_by_role("table", name="Slow statements").locator("td:last-child a")
    expect(trace).to_have_attribute("href", f"#/trace/{TRACE}")
    go(page, "Called by", "checkout")
    go(page, "Calls", "redis")
    heading(page, "redis")
    expect(both).to_have_count(3)
    page = seen.open(f"#/{PAGES['queue']}?{HOUR}")
    go(page, "Topics", "orders")
    heading(page, "orders")
    expect(page.locator(".names .tag").first).to_have_text("Topic")


def test_a_page_leads_to_traces_of_the_same_time(seen: Watched) -> None:
    """Of the service and endpoint that it is about."""
    page = seen.open(f"#/{PAGES['endpoint']}?from=now-4h")
    examples = page.get_by_role("link", name="Example traces")
    wanted = "#/traces?from=now-4h&service=checkout&endpoint=POST+%2Fcheckout"
    expect(examples).to_have_attribute("href", wanted)


def test_dragging_over_a_chart_zooms_and_back_returns(seen: Watched) -> None:
    """All charts show the selected minutes; each choice is an entry of the history."""
    page = seen.open(f"#/{PAGES['service']}?{HOUR}")
    box = page.locator(".chart .u-over").first
    box.wait_for()
    area: Any = box.bounding_box()
    page.mouse.move(area["x"] + area["width"] * 0.25, area["y"] + 40)
    page.mouse.down()
    page.mouse.move(area["x"] + area["width"] * 0.5, area["y"] + 60, steps=5)
    page.mouse.up()
    expect(page).not_to_have_url(re.compile(f"from={BEGIN}&"))
    found = re.search(r"from=(\d+)&to=(\d+)", page.url)
    assert found
    begin, end = int(found[1]), int(found[2])
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


@pytest.mark.parametrize(("step", "rows"), [("5m", 12), ("10m", 6), ("hour", 1)])
def test_steps_of_minutes(seen: Watched, step: str, rows: int) -> None:
    """5, 10 and 60 minutes a point; load stays per minute."""
    page = seen.open(f"#/{PAGES['service']}?{HOUR.replace('grain=minute', f'grain={step}')}")
    page.get_by_text("Values as a table").click()
    values = page.get_by_role("table", name="Values over time").locator("tbody tr")
    expect(values).to_have_count(rows)
    expect(values.first.locator("td").first).to_have_text("2.0", use_inner_text=True)


def test_a_range_is_compared_with_the_time_before(seen: Watched) -> None:
    """A dashed line and a number for the earlier time; the address says so."""
    second = f"from={BEGIN + 1800}&to={BEGIN + 3600}"
    page = seen.open(f"#/{PAGES['service']}?{second}")
    page.get_by_label("Compare with").select_option("before")
    expect(page).to_have_url(re.compile("compare=before"))
    seen.wait_for_request(f"from={BEGIN}&to={BEGIN + 1800}")
    expect(page.locator("dl.tiles .why").first).to_have_text("2.0 before")
    legend = page.locator(".chart").first.locator(".u-legend")
    expect(legend).to_contain_text("before")


def test_relative_ranges_in_an_address(seen: Watched) -> None:
    """Any length up to now, and addresses of older versions."""
    page = seen.open("#/services?from=now-5h")
    seen.wait_for_request("from=now-5h&to=now")
    expect(page.get_by_role("radio", name="5h")).to_be_checked()
    expect(page.locator("table.services tbody tr")).to_have_count(2)
    seen.open("#/services?range=24h")
    seen.wait_for_request("from=now-24h&to=now")
    expect(page.get_by_role("radio", name="24h")).to_be_checked()


def test_the_explorer_shows_any_metric(seen: Watched) -> None:
    """Search, choose, draw one entity; the same as PromQL and as a command."""
    page = seen.open(f"#/explore?{HOUR}")
    heading(page, "Explore")
    page.get_by_role("searchbox", name="Search metrics").fill("percentile_micros")
    page.get_by_role("option", name="service_percentile_micros").click()
    expect(page).to_have_url(re.compile("metric=service_percentile_micros"))
    boxes = page.get_by_role("table", name="Entities", exact=True).get_by_role("checkbox")
    expect(boxes).to_have_count(2)
    page.get_by_role("checkbox", name="Draw gateway").uncheck()
    expect(page.locator(".chart .u-legend")).to_contain_text("p50")
    promql, command = (page.locator(".copy code").nth(place) for place in (0, 1))
    expect(promql).to_have_text(f'batchmill_service_percentile_micros{{entity="{CHECKOUT}"}}')
    expect(command).to_contain_text("batchmill query service_percentile_micros --entity")
    expect(command).to_contain_text("--grain minute --from 20")
    page.go_back()
    expect(page.get_by_role("checkbox", name="Draw gateway")).to_be_checked()


def test_a_metric_of_a_users_own_event_type_is_in_the_explorer(seen: Watched) -> None:
    """The pages know nothing of it; its entities have pages, too."""
    page = seen.open(f"explore?metric=ticket_cents&{HOUR}")
    expect(page).to_have_url(re.compile(r"/#/explore\?metric=ticket_cents"))
    expected = [["", "Berlin", *["1,200"] * 4], ["", "Paris", *["800"] * 4]]
    expect_value(page, lambda: table_rows(page, "Entities"), expected)
    expect(page.locator(".definition")).to_contain_text("from(TicketSold.cents).longAvg()")
    go(page, "Entities", "Berlin")
    heading(page, "Berlin")
    expect(page.locator("section.group .panel h2")).to_have_text(["ticket_cents", "ticket_sales"])


def test_the_map_is_searched_and_focused(seen: Watched) -> None:
    """What is searched for with its neighbours; a service and its neighbours by one click."""
    page = seen.open(f"#/topology?{HOUR}")
    names = page.locator(".map a.node text:first-of-type")
    expect(names).to_have_count(5)
    search = page.get_by_role("searchbox", name="Search services")
    search.fill("orders")
    expect(names).to_have_count(2)
    expect(page.locator(".map a.node.hit")).to_contain_text("orders-db")
    page.get_by_role("link", name="Show all services").click()
    expect(names).to_have_count(5)
    page.locator(".map a.aim").first.wait_for()
    page.get_by_role("link", name="Only gateway and its neighbours").click()
    expect(names).to_have_count(2)
    expect(page).to_have_url(re.compile("focus="))
    page.go_back()
    expect(names).to_have_count(5)
    go(page, "Calls between services", "Details")
    expect(page.locator(".trail a")).to_have_count(3)


GROUPED = """async ([count, open]) => {
    const { view } = await import('/static/js/grouping.js');
    const teams = ['shop', 'pay', 'ads', 'mail'];
    const nodes = Array.from({length: count}, (_, n) => (
        {id: `${n}`, name: `${teams[n % 4]}-api-${n}`, cpm: 1, success: n ? 1 : 0.5}));
    const edges = nodes.slice(1).map(({id}, n) => ({from: `${n}`, to: id, cpm: 2, avg: 1, p99: 1,
        success: 1}));
    const shown = view({nodes, edges}, {open});
    return [shown.nodes.length, shown.groups, shown.nodes[0].members ?? 1, shown.nodes[0].success,
        shown.edges.reduce((sum, edge) => sum + edge.cpm, 0)];
}"""


@pytest.mark.parametrize(
    ("count", "opened", "expected"),
    [
        (80, "", [80, 0, 1, 0.5, 158]),
        (400, "", [4, 4, 100, 0.5, 798]),
        (400, "shop", [80, None, None, None, None]),
    ],
)
def test_more_than_80_services_are_grouped(
    seen: Watched, count: int, opened: str, expected: list[Any]
) -> None:
    """By the first parts of their names; calls are added up, the worst success is shown."""
    page = seen.open("#/topology")
    shown = page.evaluate(GROUPED, [count, opened])
    assert shown[0] <= expected[0]
    for value, wanted in zip(shown[1:], expected[1:], strict=True):
        assert wanted is None or value == wanted


def test_nothing_moves_when_data_comes(seen: Watched) -> None:
    """Grey shapes hold the places; the browser itself counts what moved."""
    page = seen.page
    page.add_init_script(
        """window.moved = 0;
        new PerformanceObserver(list => list.getEntries().forEach(entry => {
            window.moved += entry.value;
        })).observe({type: 'layout-shift', buffered: true});"""
    )
    held: list[Any] = []

    def hold(route: Any) -> None:
        held.append(route)

    page.route("**/api/v1/entities/**", hold)
    seen.open(f"#/{PAGES['service']}?{HOUR}")
    expect(page.locator(".skeleton")).to_have_count(10)
    for route in held:
        route.continue_()
    expect_value(page, lambda: len(tiles(page)), 5)
    expect(page.locator(".chart canvas")).to_have_count(5)
    assert page.evaluate("window.moved") < 0.02


def test_charts_are_in_two_columns_that_fill_the_width(seen: Watched) -> None:
    """At 1440 pixels; the last of an odd number is as wide as the page."""
    page = seen.open(f"#/{PAGES['service']}?{HOUR}")
    expect(page.locator(".chart canvas")).to_have_count(5)
    widths = page.locator(".charts > .panel").evaluate_all(
        "panels => panels.map(panel => Math.round(panel.getBoundingClientRect().width))"
    )
    whole = widths[-1]
    assert whole >= 1380
    assert all(abs(2 * width + 16 - whole) <= 2 for width in widths[:-1])


@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["1440", "390"])
def test_all_pages_fit(browser: Browser, address: str, size: tuple[int, int]) -> None:
    """Nothing is wider than the screen, light or dark, and nothing is written to the console."""
    with watched_page(browser, address, size, color_scheme="light") as seen:
        for name, where in PAGES.items():
            page = seen.open(f"#/{where}?{HOUR}")
            page.locator("main[aria-busy]").wait_for(state="detached")
            page.locator(".skeleton").first.wait_for(state="detached")
            fits = f"document.documentElement.scrollWidth <= {size[0]}"
            for scheme in SCHEMES:
                page.emulate_media(color_scheme=scheme)
                expect_value(page, partial(page.evaluate, fits), True)
                keep_shot(page, f"{name}-{size[0]}-{scheme}")
