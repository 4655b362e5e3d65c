"""The pages of entities, the explorer and the map in a real browser, over a shop that is known."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from batchmill.alerts import AlertEngine, AlertSettings, load_rules
from batchmill.store import open_store
from tests.kit.servers.browser import (
    PHONE,
    Watched,
    expect_value,
    keep_shot,
    table_rows,
    watched_page,
)
from tests.web.browser.charts import drawn_chart, record_charts
from tests.web.browser.home import (
    BEGIN,
    HEADINGS,
    OTHER_INSTANCE,
    PAGES,
    QUICK,
    RULES,
    SHOWN,
    SLOW,
    full_home,
    trace_id,
)
from tests.web.browser.screen import FORMS, SCHEMES, WIDE, faults, in_every_form
from tests.web.entities_kit import (
    CHECKOUT,
    READ,
    STATEMENT,
    TRACE,
    WRITE,
)
from tests.web.kit import serving as serving_here
from tests.web.kit import serving_all
from tests.web.pages_kit import serving
from tests.web.traffic import Call, Shop

pytest.importorskip("playwright.sync_api")
pytest.importorskip("uvicorn")

from playwright.sync_api import expect

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.slow(45), pytest.mark.system]

NONE = "\N{EN DASH}"
"""No value."""
HOUR = f"from={BEGIN}&to={BEGIN + 3600}&grain=minute"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of a run's folder that has something for every page."""
    folder = tmp_path_factory.mktemp("entities")
    home = full_home(folder)
    with serving(folder, f"--home={home.folder}") as (served, _):
        yield served


@pytest.fixture
def seen(browser: Browser, address: str) -> Iterator[Watched]:
    """A page of that server, as wide as a laptop's screen."""
    with watched_page(browser, address, WIDE) as watched:
        yield watched


@pytest.fixture(params=FORMS)
def in_form(request: pytest.FixtureRequest, browser: Browser, address: str) -> Iterator[Watched]:
    """A page of that server, on a desk and on a phone."""
    with watched_page(browser, address, **request.param) as watched:
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


def test_every_list_leads_to_the_page_of_what_it_names(in_form: Watched) -> None:
    """Endpoint, instance, relation, database, cache, queue and topic, and back by the trail."""
    page = in_form.open(f"#/{PAGES['service']}?{HOUR}")
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
    commands = [row[:5] for row in table_rows(page, "Slow commands")]
    assert commands == [
        [WRITE, "redis", "120 ms", "1", "120 ms"],
        [READ, "redis", "80 ms", "2", "130 ms"],
    ]
    page = in_form.open(f"#/{PAGES['queue']}?{HOUR}")
    go(page, "Topics", "orders")
    heading(page, "orders")
    expect(page.locator(".names .tag").first).to_have_text("Topic")
    page = in_form.open(f"#/traces?{HOUR}")
    page.locator(".found a.tag", has_text="checkout").first.click()
    heading(page, "checkout")
    expect_value(page, lambda: len(tiles(page)), 5)
    for place, (kind, name) in enumerate(
        [("service", "checkout"), ("endpoint", "POST /checkout"), ("instance", "checkout-1")]
    ):
        page = in_form.open(f"#/trace/{TRACE}")
        page.locator(".waterfall .row .line", has_text="POST /checkout").click()
        page.locator(".details dd a").nth(place).click()
        heading(page, name)
        assert f"#/{kind}/" in page.url
        expect(page.locator("[data-measure=cpm] dd")).to_have_text("2.0")
    for number, call, name in ((SLOW, "SELECT orders", "orders-db"), (QUICK, "publish", "kafka")):
        page = in_form.open(f"#/trace/{trace_id(number)}")
        page.locator(".waterfall .row .line", has_text=call).click()
        page.locator(".details").get_by_role("link", name=name, exact=True).click()
        heading(page, name)
        expect(page.locator(".names .tag").first).to_have_text(re.compile("Database|Message queue"))
    page = in_form.open("#/pipeline")
    table = page.get_by_role("table", name="Too many new names")
    link = table.get_by_role("link", name="shop", exact=True)
    expect(link).to_have_attribute("href", "#/service/shop")


EXAMPLES = {
    "service": [OTHER_INSTANCE, SLOW],
    "endpoint": [OTHER_INSTANCE, SLOW],
    "instance": [SLOW],
    "relation": [OTHER_INSTANCE, SLOW],
    "endpoint-relation": [OTHER_INSTANCE, SLOW],
    "instance-relation": [SLOW],
    "database": [SLOW],
    "cache": [QUICK],
}
PEERS = {"database": "orders-db", "cache": "redis"}
FOUND = ".found .line > a[href*=trace]"


def test_a_p99_leads_to_traces_of_the_spans_it_counts(seen: Watched) -> None:
    """Of the same time; from the number and from its chart; the form has all of the filter."""
    for name, expected in EXAMPLES.items():
        page = seen.open(f"#/{PAGES[name]}?{HOUR}")
        link = page.locator("[data-measure=p99] a")
        chart = page.locator(".panel", has=page.locator("h2[id$=p99]")).locator("a.examples")
        expect(chart.first).to_have_attribute("href", str(link.first.get_attribute("href")))
        link.first.click()
        peer = PEERS.get(name, "")
        expect(page.get_by_label("Calls to")).to_have_value(peer)
        expect(page.get_by_label("Kind")).to_have_value("" if peer else "server")
        trace_ids = [trace_id(trace) for trace in expected]
        ids = "rows => rows.map(row => row.hash.split('/').at(-1))"
        expect_value(page, partial(page.locator(FOUND).evaluate_all, ids), trace_ids)
        assert f"from={BEGIN}&to={BEGIN + 3600}" in page.url
    # The filter stays as the form is used.
    page.get_by_label("Longer than (ms)").fill("1")
    page.get_by_role("button", name="Find traces").click()
    expect(page).to_have_url(re.compile("peer=redis.*min_ms=1"))
    expect(page.locator(FOUND)).to_have_count(1)


def test_a_page_leads_to_traces_of_the_same_time(seen: Watched) -> None:
    """Of the service and endpoint that it is about; of a queue, those of its messages."""
    page = seen.open(f"#/{PAGES['endpoint']}?from=now-4h")
    examples = page.get_by_role("link", name="Example traces", exact=True)
    wanted = "#/traces?from=now-4h&service=checkout&name=POST+%2Fcheckout"
    expect(examples).to_have_attribute("href", wanted)
    for name in ("queue", "topic"):
        page = seen.open(f"#/{PAGES[name]}?{HOUR}")
        examples.click()
        expect(page.locator(FOUND)).to_have_attribute("href", f"#/trace/{trace_id(QUICK)}")


def test_two_clicks_lead_from_an_alert_to_the_trace_of_a_slow_statement(in_form: Watched) -> None:
    """Alert, service, slow statement, trace: the story of the README."""
    page = in_form.open(f"#/alerts?{HOUR}")
    go(page, "Firing", "checkout")
    heading(page, "checkout")
    statements = page.get_by_role("table", name="Slow statements")
    statements.locator("tbody tr", has_text=STATEMENT).locator("td:last-child a").click()
    spans = page.locator(".waterfall .row .line .what b")
    expect(spans).to_have_text(["gateway", "gateway", "checkout", "checkout"])
    for span in spans.all():
        expect(span).to_be_in_viewport()
    expect(page.locator(".waterfall")).to_contain_text("SELECT orders")
    keep_shot(page, f"story-trace-{page.evaluate('innerWidth')}")


def test_a_trace_of_too_many_spans_says_how_many_are_not_shown(seen: Watched) -> None:
    """The server reads so many of them at most, and says how many it left out."""

    def cut(route: Any) -> None:
        route.fulfill(json=route.fetch().json() | {"spans_left_out": 12_345})

    page = seen.open(f"#/trace/{TRACE}")
    expect(page.locator(".facts")).to_contain_text("Spans4")
    expect(page.locator(".facts")).not_to_contain_text("not shown")
    page.route("**/api/v1/traces/*", cut)
    page.reload()
    expect(page.locator(".facts")).to_contain_text("Spans not shown12,345")
    in_every_form(page, "trace-left-out", page.locator(".facts").get_by_text("12,345"))


def test_the_explorer_shows_any_metric(in_form: Watched) -> None:
    """Search, choose, draw one entity, with its alerts; as a command, and as PromQL, which runs."""
    page = in_form.open(f"#/explore?{HOUR}")
    heading(page, "Explore")
    page.get_by_role("searchbox", name="Search metrics").fill("percentile_micros")
    page.get_by_role("option", name="service_percentile_micros").click()
    expect(page).to_have_url(re.compile("metric=service_percentile_micros"))
    boxes = page.get_by_role("table", name="Entities", exact=True).get_by_role("checkbox")
    expect(boxes).to_have_count(2)
    page.get_by_role("checkbox", name="Draw gateway").uncheck()
    expect(page.locator(".chart .u-legend")).to_contain_text("p50")
    promql, command = (page.locator(".copy code").nth(place) for place in (0, 1))
    expect(promql).to_have_text(f'batchmill_service_percentile_micros{{entity_id="{CHECKOUT}"}}')
    expect(command).to_contain_text("batchmill query service_percentile_micros --entity")
    expect(command).to_contain_text("--grain minute --from 20")
    marked = re.compile("slow fired from .* on")
    expect(page.locator(".chart")).to_have_attribute("aria-label", marked)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator(".copy button").first.click()
    expect(page.locator(".copy button").first).to_have_text("Copied")
    query = page.evaluate("navigator.clipboard.readText()")
    assert query == promql.inner_text()
    answer = page.request.get(
        f"{in_form.address}/api/v1/query",
        params={"query": query, "time": str(BEGIN + 1830)},
    ).json()
    assert {line["metric"]["entity_id"] for line in answer["data"]["result"]} == {CHECKOUT}
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
    in_every_form(page, "topology-focus", *names.all())
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


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server over 90 services of two teams; one is called more a day and a week before."""
    url = f"sqlite:///{tmp_path_factory.mktemp('many')}/store.db"
    calls = [
        Call(f"{'shop' if n % 2 else 'pay'}-api-{n}", 20, BEGIN, caller="edge") for n in range(90)
    ]
    for days, more in ((1, 3), (7, 5)):
        calls += [Call("pay-api-0", 20, BEGIN - days * 86_400)] * more
    with open_store(url) as store:
        Shop(store).commit(calls)
    with serving_all(url) as server:
        yield server.address


def test_groups_of_services_are_drawn_and_opened(browser: Browser, many: str) -> None:
    """A box for each team, with the number of its services; Back closes it."""
    with watched_page(browser, many, WIDE) as watched:
        page = watched.open(f"#/topology?{HOUR}")
        boxes, groups = page.locator(".map a.node"), page.locator(".map a.node.group")
        expect(groups).to_have_count(2)
        expect(boxes).to_have_count(3)
        expect(groups.filter(has_text="shop")).to_contain_text("45 services")
        expect(page.locator(".map .edge")).to_have_count(2)
        in_every_form(page, "topology-groups", *groups.all())
        groups.filter(has_text="shop").click()
        expect(page).to_have_url(re.compile("group=shop"))
        expect(groups).to_have_count(0)
        expect(boxes).to_have_count(46)  # with their caller
        page.go_back()
        expect(groups).to_have_count(2)


@pytest.mark.parametrize(
    ("compare", "name", "calls"), [("1d", "a day before", 3), ("1w", "a week before", 5)]
)
def test_a_range_is_compared_with_that_of_another_day(
    browser: Browser, many: str, compare: str, name: str, calls: int
) -> None:
    """On the page of a service, in the explorer and in the list of services.

    A number, and a dashed line.
    """
    minute = f"from={BEGIN}&to={BEGIN + 60}&grain=minute"
    with watched_page(browser, many, WIDE) as watched:
        record_charts(watched.page)
        page = watched.open(f"#/service/pay-api-0?{minute}")
        page.get_by_label("Compare with").select_option(compare)
        number = page.locator("[data-measure=cpm] .why")
        expect(number).to_have_text(f"{calls}.0 {name}")
        in_every_form(page, f"compared-{compare}", number)
        watched.open(f"#/explore?metric=service_cpm&search=pay-api-0&{minute}&compare={compare}")
        expect(page.locator(".chart .u-legend")).to_contain_text(name)
        line = drawn_chart(page, "section[aria-labelledby=chart-explore]")["lines"][-1]
        assert (line["label"], line["dash"], line["values"]) == (name, [6, 4], [calls])
        legend = page.locator(".chart .u-legend").get_by_text(name)
        in_every_form(page, f"explore-compared-{compare}", legend)
        watched.open(f"#/services?search=pay&{minute}&sort=name&order=asc")
        page.get_by_label("Compare with").select_option(compare)
        expect(page).to_have_url(re.compile(f"compare={compare}"))
        first, second = (page.locator("table.services tbody tr").nth(number) for number in (0, 1))
        earlier = [f"{calls}.0", "20 ms", "20 ms", "100.00 %", "1.00"]
        expect(first.locator(".earlier")).to_have_text([f"{text} {name}" for text in earlier])
        expect(first.locator(".spark .was").first).to_have_attribute("d", re.compile("^M"))
        expect(second.locator(".earlier")).to_have_text([f"{NONE} {name}"] * 5)
        expect(second.locator(".spark .was").first).to_have_attribute("d", "")
        lowest = page.locator(".tile", has_text="Lowest success rate").locator(".why")
        expect(lowest).to_have_text(["no call failed", f"100.00 % {name}"])
        in_every_form(page, f"services-compared-{compare}", first.locator(".earlier").first)
        page.get_by_label("Compare with").select_option("")
        expect(page.locator(".earlier").first).to_be_hidden()
        expect(lowest).to_have_text("no call failed")


LEAST_MOVE = 0.002
"""What is not seen: the share of the screen that moved, times how far."""
MOVED = """window.moved = [];
new PerformanceObserver(list => list.getEntries().forEach(({value, sources}) => {
    const what = sources.map(({node}) => node?.className || node?.nodeName);
    window.moved.push([value, what]);
})).observe({type: 'layout-shift', buffered: true});"""


@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["1440", "390"])
def test_nothing_moves_when_data_comes(
    browser: Browser, address: str, size: tuple[int, int]
) -> None:
    """Grey shapes hold the places on every page; the browser itself counts what moved.

    The server says that its run is down, which is a notice on every page.
    """
    held: list[Any] = []
    holding, passing = True, ""

    def hold(route: Any) -> None:
        if holding and not re.search(passing, route.request.url):
            held.append(route)
        else:
            route.continue_()

    with watched_page(browser, address, size) as seen:
        page = seen.page
        page.add_init_script(MOVED)
        page.route("**/api/v1/**", hold)
        wrong = {}
        for name, where in PAGES.items():
            page.goto("about:blank")
            holding = True
            # The pipeline's data comes by the live connection as well.
            passing = "status" if name == "pipeline" else "status|live"
            seen.open(f"#/{where}?{HOUR}")
            expect(page.locator(".skeleton").first).to_be_visible()
            if name != "pipeline":
                expect(page.locator(".notice")).to_be_visible()
            holding = False
            while held:
                held.pop().continue_()
            expect(page.locator(".skeleton")).to_have_count(0)
            page.locator("main[aria-busy]").wait_for(state="detached")
            moved = page.evaluate("window.moved")
            wrong[name] = [part for part in moved if part[0] > LEAST_MOVE]
        assert {name: parts for name, parts in wrong.items() if parts} == {}


def test_an_alert_that_begins_to_fire_is_shown_and_moves_nothing(
    browser: Browser, tmp_path: Path
) -> None:
    """With the next commit: in the page's head, as its last panel, and on its charts."""
    url = f"sqlite:///{tmp_path}/store.db"
    now = int(time.time()) // 60 * 60
    (tmp_path / "alerts.toml").write_text(RULES)
    with open_store(url) as store, serving_here(url) as server:
        shop = Shop(store)
        shop.commit([Call("shop", 20, now - 60 * minute) for minute in range(1, 10)])
        rules = load_rules(tmp_path / "alerts.toml").rules
        with watched_page(browser, server.address, WIDE) as watched:
            page = watched.page
            page.add_init_script(MOVED)
            watched.open("#/service/shop?range=15m")
            chart = page.locator(".chart").first
            chart.locator("canvas").wait_for()
            page.locator("#live[data-state=live]").wait_for()
            expect(page.get_by_text("1 alert firing")).to_be_hidden()
            with AlertEngine(
                store, rules, settings=AlertSettings(), clock=lambda: now + 20.0
            ) as engine:
                engine.evaluate()
            shop.commit([Call("shop", 20, now)])
            page.get_by_text("1 alert firing").click()
            expect(chart).to_have_attribute("aria-label", re.compile("slow fired from .* on"))
            panel = page.get_by_role("table", name="Alerts in this time range")
            expect(panel).to_be_in_viewport()
            moved = page.evaluate("window.moved")
            assert not [part for part in moved if part[0] > LEAST_MOVE]
            in_every_form(page, "alert-fires", chart, panel)


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
def test_every_page_is_shown_in_light_and_dark(
    browser: Browser, address: str, size: tuple[int, int]
) -> None:
    """Its heading and data fit on the screen and can be read; nothing goes to the console.

    A scheme is changed on the open page: its charts are drawn again, in the colours of the scheme.
    """
    wrong: list[str] = []
    with watched_page(browser, address, size, color_scheme="light") as seen:
        for name, where in PAGES.items():
            page = seen.open(f"#/{where}?{HOUR}")
            heading(page, HEADINGS[name])
            expect(page.locator(SHOWN[name]).first).to_be_visible()
            page.locator("main[aria-busy]").wait_for(state="detached")
            expect(page.locator(".skeleton")).to_have_count(0)
            for scheme in SCHEMES:
                page.emulate_media(color_scheme=scheme)
                wrong += [f"{name}, {scheme}: {fault}" for fault in faults(page, scheme)]
                keep_shot(page, f"{name}-{size[0]}-{scheme}")
            page.emulate_media(color_scheme="light")
        assert not wrong, "\n".join(wrong)
