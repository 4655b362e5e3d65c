"""The map of services: more boxes than fit, measures that are missing, what is no longer there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from batchmill.sources import service_id
from batchmill.store import open_store
from tests.kit.servers.browser import Watched, table_rows, watched_page
from tests.web.browser.screen import in_every_form
from tests.web.kit import serving_all
from tests.web.pages_kit import BEGIN
from tests.web.traffic import CORE, Call, Shop

pytest.importorskip("playwright.sync_api")
pytest.importorskip("uvicorn")

from playwright.sync_api import expect

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [pytest.mark.slow(20), pytest.mark.system]

HOUR = f"from={BEGIN}&to={BEGIN + 3600}"
WITHOUT_PERCENTILES = "\n".join(line for line in CORE.splitlines() if "percentile" not in line)
SERVICES = 100
NONE = "\N{EN DASH}"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server over services whose names have no common parts, in a store without percentiles."""
    url = f"sqlite:///{tmp_path_factory.mktemp('services')}/store.db"
    calls = [
        Call(f"team{n}", 20, BEGIN, caller="gate")
        for n in range(SERVICES)
        for _ in range(3 if n < 50 else 1)
    ]
    with open_store(url) as store:
        Shop(store, script=WITHOUT_PERCENTILES).commit(calls)
    with serving_all(url) as server:
        yield server.address


@pytest.fixture
def seen(browser: Browser, address: str) -> Iterator[Watched]:
    """A page of that server."""
    with watched_page(browser, address, (1440, 900)) as watched:
        yield watched


def test_what_does_not_fit_is_one_box_that_promises_nothing(seen: Watched) -> None:
    """It says how to see its services, and is no link; nor are the calls to it."""
    page = seen.open(f"#/topology?{HOUR}")
    boxes = page.locator(".map a.node")
    expect(boxes).to_have_count(80)
    rest = boxes.filter(has_text="other services")
    count = SERVICES + 1 - 79
    expect(rest).to_contain_text(f"{count} services")
    expect(rest.locator("title")).to_have_text(f"{count} services with fewer calls: search for one")
    expect(rest).not_to_have_attribute("href", re.compile(""))
    expect(page.locator(".map a[href=''], .map a[href='#/topology']")).to_have_count(0)
    tips = page.locator(".map .edge title").all_text_contents()
    assert len(tips) == 79
    assert all(f"20 ms on average, p99 {NONE}, 100.00 % succeed" in tip for tip in tips)
    for address in page.locator(".map a[href]").evaluate_all(
        "all => all.map(a => a.getAttribute('href'))"
    ):
        assert re.match("#/(service|relation|topology)[/?].", address)
    page.get_by_role("searchbox", name="Search services").fill("team99")
    expect(boxes).to_have_count(2)


def test_measures_that_the_store_does_not_have_are_shown_as_missing(seen: Watched) -> None:
    """Of boxes, groups, calls and rows alike: a dash, not 0 or NaN."""
    page = seen.open(f"#/topology?{HOUR}&focus={service_id('team7', True)}")
    expect(page.locator(".map a.node")).to_have_count(2)
    rows = table_rows(page, "Calls between services")
    ends = ["gate", "team7", "3.0", "20 ms", "20 ms", NONE, NONE, "100.00 %", "100.00 %", "Details"]
    assert rows == [ends]
    in_every_form(page, "topology-missing", *page.locator(".map a.node").all())


GROUPED = """async () => {
    const { view } = await import('/static/js/grouping.js');
    const nodes = Array.from({length: 200}, (_, n) => (
        {id: `${n}`, name: `${n % 2 ? 'shop' : 'pay'}-${n}`, cpm: null, avg: null, success: null}));
    const nothing = {cpm: null, avg: null, p99: null, success: null};
    const edges = nodes.slice(2).map(({id}) => (
        {from: `${id % 2 ? 0 : 1}`, to: id, ...nothing, caller: nothing, callee: null}));
    const shown = view({nodes, edges}, {});
    return [shown.nodes.map(({name, cpm, success}) => [name, cpm, success]), shown.edges];
}"""


def test_groups_of_services_without_measures_have_none(seen: Watched) -> None:
    """Nothing added to nothing is not 0 calls in 0 ms."""
    page = seen.open("#/topology")
    boxes, edges = page.evaluate(GROUPED)
    assert boxes == [["pay", None, None], ["shop", None, None]]
    nothing = {"cpm": None, "avg": None, "p99": None, "success": None}
    groups = ("group:pay", "group:shop")
    assert sorted(edges, key=lambda edge: edge["from"]) == [
        {"from": one, "to": other, **nothing, "caller": nothing, "callee": None}
        for one, other in (groups, groups[::-1])
    ]


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (f"focus={service_id('old-cart', True)}", "No calls of “old-cart” in this time range."),
        ("focus=nonsense!", "No calls of “nonsense!” in this time range."),
        ("group=old", "No service of the group “old” in this time range."),
        ("search=old", "No service with “old” in its name in this time range."),
    ],
)
def test_what_is_gone_is_said(seen: Watched, part: str, said: str) -> None:
    """An address of yesterday: not everything, as if nothing had been asked, and no “null”."""
    page = seen.open(f"#/topology?{HOUR}&{part}")
    expect(page.locator("main .empty")).to_have_text(said)
    expect(page.locator(".map")).to_have_count(0)
    page.get_by_role("link", name="Show all services").click()
    expect(page.locator(".map a.node")).to_have_count(80)
