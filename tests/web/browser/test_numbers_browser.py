"""What a person sees of numbers that must not mislead, in a real browser."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from batchmill.store import open_store
from batchmill.web.api import measures, overview
from tests.kit.processes import Life, pause_process
from tests.kit.servers.browser import (
    Watched,
    expect_value,
    table_rows,
    watched_page,
)
from tests.web.browser.charts import drawn_chart, record_charts
from tests.web.browser.screen import in_every_form
from tests.web.kit import FakeRun
from tests.web.kit import serving as serving_here
from tests.web.pages_kit import BEGIN, OWN, serving
from tests.web.traffic import USER, Call, Shop

pytest.importorskip("playwright.sync_api")
pytest.importorskip("uvicorn")

from playwright.sync_api import expect

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [pytest.mark.slow, pytest.mark.system]


@pytest.fixture
def store_url(tmp_path: Path) -> str:
    """A store of one's own."""
    return f"sqlite:///{tmp_path}/store.db"


@pytest.fixture
def seen(browser: Browser, tmp_path: Path, store_url: str) -> Iterator[Watched]:
    """A page of a server on that store, without a run."""
    with (
        serving(tmp_path, f"--store={store_url}") as (address, _),
        watched_page(browser, address) as watched,
    ):
        yield watched


def fill(url: str, *calls: Call) -> None:
    """Put calls into a store."""
    with open_store(url) as store:
        Shop(store).commit(calls)


def test_the_bucket_that_is_filling_is_dotted_and_apart(store_url: str, seen: Watched) -> None:
    """Not in the totals, the scale, nor the legend, which shows the newest complete minute.

    The explorer's Newest, Least and Most leave it out as well.
    """
    now = int(time.time() - 10) // 60 * 60  # so that the minute before it is complete
    calls = [Call("shop", 20, now - 60 * minute) for minute in range(1, 11) for _ in range(10)]
    fill(store_url, *calls, *(Call("shop", 9000, now, ok=ok) for ok in (True, False)))
    record_charts(seen.page)
    page = seen.open("#/services?range=15m")
    expect_value(
        page,
        lambda: table_rows(page, "Services"),
        [["shop", "10", "20 ms", "20 ms", "100.00 %", "1.00"]],
    )
    dots = page.locator("table.services .spark .dots")
    expect(dots.first).to_have_attribute("d", re.compile("^M.*L"))
    in_every_form(page, "filling-overview", dots.first)
    page = seen.open("#/service/shop?range=15m")
    tiles = page.locator("dl.tiles dd")
    expect(tiles.nth(3)).to_have_text("100.00 %")
    load = page.locator("section", has=page.locator("#chart-0-cpm"))
    expect(load.locator(".u-legend .u-value").nth(1)).to_have_text("10")
    chart = drawn_chart(page, "section[aria-labelledby=chart-0-avg]")
    assert chart["top"] < 30, "the filling bucket's 9 s are not in the scale"
    whole, filling = chart["lines"][:2]
    assert (whole["dash"], filling["dash"]) == ([], [2, 4])
    there = [[value for value in line["values"] if value] for line in (whole, filling)]
    assert there == [[20] * 10, [20, 9000]]
    page.get_by_text("Values as a table").click()
    values = page.get_by_role("table", name="Values over time").locator("tbody tr")
    last = values.filter(has_text="9.00 s")
    expect(last).to_contain_text("(incomplete)")
    in_every_form(page, "filling-service", last, *page.locator(".chart canvas").all())
    page = seen.open("#/explore?metric=service_resp_time_micros&range=15m")
    expect_value(page, lambda: table_rows(page, "Entities"), [["", "shop", *["20 ms"] * 4]])
    chart = drawn_chart(page, "section[aria-labelledby=chart-explore]")
    assert chart["top"] < 30
    page.get_by_text("Values as a table").click()
    expect(last).to_contain_text("(incomplete)")
    in_every_form(page, "filling-explore", last, page.locator(".chart canvas"))


def test_totals_stay_as_one_searches(store_url: str, seen: Watched) -> None:
    """Requests from outside, each once, and the lowest success of all services, beyond a page."""
    calls = [Call("shop", 20, BEGIN + n * 60, caller=USER) for n in range(60)]
    calls += [Call(f"s{n}", 5, BEGIN, caller="shop", ok=n != 70) for n in range(80)]
    fill(store_url, *calls)
    page = seen.open(f"#/services?{OWN}")
    tiles = page.locator("dl.tiles .tile")
    expect(tiles.nth(0)).to_contain_text("Requests from outside1.0 per min")
    expect(tiles.nth(1)).to_contain_text("0.00 %s70")
    page.get_by_role("searchbox", name="Search services").fill("shop")
    page.get_by_text("1 service", exact=True).wait_for()
    expect(tiles.nth(0)).to_contain_text("1.0 per min")
    expect(tiles.nth(1)).to_contain_text("0.00 %s70")
    in_every_form(page, "totals", tiles.nth(0), tiles.nth(1))
    tiles.nth(1).get_by_role("link", name="s70").click()
    page.get_by_role("heading", name="s70", level=1).wait_for()


def test_totals_of_the_busiest_services_say_so(
    browser: Browser, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of how many: there may be another one that fails."""
    for module in (measures, overview):
        monkeypatch.setattr(module, "MANY", 5)
    fill(store_url, *(Call(f"s{n}", 20, BEGIN, caller=USER) for n in range(8) for _ in range(n)))
    with serving_here(store_url) as server, watched_page(browser, server.address) as watched:
        page = watched.open(f"#/services?{OWN}")
        tiles = page.locator("dl.tiles .tile")
        for number in range(2):
            expect(tiles.nth(number)).to_contain_text("of the 5 busiest services")
        in_every_form(page, "totals-busiest", tiles.nth(0), tiles.nth(1))


def test_an_edge_labels_the_values_of_both_sides(store_url: str, seen: Watched) -> None:
    """In the table's columns, and where the mouse rests on the line."""
    calls = [Call("cart", 5, BEGIN, caller="shop", caller_ok=n != 0) for n in range(4)]
    fill(store_url, *calls)
    page = seen.open(f"#/topology?{OWN}")
    heads = page.get_by_role("table", name="Calls between services").locator("thead th")
    names = ["Caller", "Callee", "Calls/min"]
    names += [
        f"{name}, {side}" for name in ("Average", "p99", "Success") for side in ("caller", "callee")
    ]
    expect(heads).to_have_text([*names, "Relation"])
    expect_value(
        page,
        lambda: table_rows(page, "Calls between services")[0][-3:-1],
        ["75.00 %", "100.00 %"],
    )
    title = page.locator(".map .edge title")
    expect(title).to_have_text(
        re.compile(r"As the caller sees it.*75\.00 %.*\n.*As the callee.*100\.00 %")
    )
    expect(page.locator(".map .edge")).to_have_class(re.compile("bad"))
    in_every_form(page, "both-sides", *heads.all(), page.locator(".map .edge"))


def test_a_database_leads_from_the_map_to_its_page(store_url: str, seen: Watched) -> None:
    """With the values of its accesses; its own address shows the same."""
    layer = "VIRTUAL_DATABASE"
    calls = [
        Call("orders-db:5432", 0.4, BEGIN + n * 60, caller="cart", layer=layer) for n in range(60)
    ]
    fill(store_url, *calls)
    page = seen.open(f"#/topology?{OWN}")
    page.locator(".map a.node", has_text="orders-db").click()
    for _ in range(2):
        page.get_by_role("heading", name="orders-db:5432", level=1).wait_for()
        tiles = page.locator("dl.tiles dd")
        expect(tiles.nth(0)).to_have_text("1.0")
        expect(tiles.nth(1)).to_have_text("0.40 ms")
        expect(page.locator(".chart canvas")).to_have_count(4)
        page = seen.open(f"#/service/orders-db%3A5432?{OWN}")
    in_every_form(page, "database", *tiles.all())


def test_the_pill_shows_the_health_of_the_run(
    browser: Browser, tmp_path: Path, store_url: str
) -> None:
    """A stopped ingest turns it red within seconds, as ``batchmill status`` exits with 2."""
    fill(store_url, Call("shop", 20, BEGIN))
    home = tmp_path / "home"
    command = [sys.executable, "-m", "batchmill"]
    ingest = Life(
        [*command, "ingest", f"--home={home}", "--http-port=0", "--grpc-port=0"],
        tmp_path / "ingest-errors",
        os.environ,
    )
    try:
        ingest.must_hear("(?i).*http.*")
        with (
            serving(tmp_path, f"--store={store_url}", f"--home={home}") as (address, _),
            watched_page(browser, address) as watched,
        ):
            page = watched.open("#/services")
            pill = page.locator("#live-text")
            expect(pill).to_have_text("Healthy")
            pause_process(ingest.pid)
            expect(pill).to_have_text("Down", timeout=10_000)
            expect(page.locator("#live")).to_have_attribute("title", re.compile("SIGSTOP"))
            status = [*command, "status", f"--home={home}"]
            assert subprocess.run(status, check=False, capture_output=True).returncode == 2
            in_every_form(page, "pill-down", pill)
            os.kill(ingest.pid, signal.SIGCONT)
            expect(pill).to_have_text("Healthy", timeout=10_000)
    finally:
        os.kill(ingest.pid, signal.SIGCONT)
        ingest.kill()


def test_without_a_run_the_pill_says_live(store_url: str, seen: Watched) -> None:
    """There is no run whose health could be told."""
    fill(store_url, Call("shop", 20, BEGIN))
    pill = seen.open("#/services").locator("#live-text")
    expect(pill).to_have_text("Live")
    in_every_form(seen.page, "pill-live", pill)


def test_a_run_that_reports_nothing_is_not_responding(browser: Browser, store_url: str) -> None:
    """The connection is up, but for seconds there was no status: the pill does not stay green."""
    fill(store_url, Call("shop", 20, BEGIN))
    states = iter([{"health": "healthy", "reasons": [], "at": BEGIN}])
    with (
        serving_here(store_url, run=FakeRun(lambda: next(states))) as server,
        watched_page(browser, server.address) as watched,
    ):
        pill = watched.open("#/services").locator("#live")
        expect(pill).to_have_attribute("data-state", "live")
        expect(pill).to_have_text("Not responding")
        expect(pill).to_have_attribute("data-health", "silent")
        in_every_form(watched.page, "pill-silent", pill)
