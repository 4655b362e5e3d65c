"""Alerts in the web API and, in a real browser, on their page and on the charts of a service."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from batchmill.alerts import AlertEngine, AlertSettings, load_rules
from batchmill.sources import service_id
from batchmill.store import Store, open_store
from tests.alerts.kit import ERRORS, Shop, ends, rules_of
from tests.kit.servers.browser import (
    Watched,
    reused_page,
    running_chromium,
    table_rows,
    watched_page,
)
from tests.web.browser.screen import in_every_form
from tests.web.kit import START_S, Call, serving, serving_all
from tests.web.pages_kit import BEGIN, OWN, filled_store

pytest.importorskip("playwright.sync_api")
pytest.importorskip("uvicorn")

from playwright.sync_api import expect

if TYPE_CHECKING:
    from playwright.sync_api import Browser

RULES = """
[[rule]]
name = "errors"
expression = "service_sla / 100"
comparison = "< 95"
severity = "critical"
message = "{name}: {value} %"

[[rule]]
name = "slow"
expression = "service_resp_time"
comparison = "> 500"
message = "{name} takes {value} ms"

[[rule]]
name = "slow_for_long"
expression = "service_resp_time"
comparison = "> 500"
period = 100

[[rule]]
name = "slow_endpoint"
expression = "endpoint_resp_time"
comparison = "> 500"
period = 100
"""


def test_the_api_lists_alerts_of_a_range_and_of_an_entity(tmp_path: Path) -> None:
    """What fires, what fired in the range, and the rules with their position."""
    url = f"sqlite:///{tmp_path}/store.db"
    with open_store(url) as store:
        shop = Shop(store)
        shop.minute(0, web=(1, 9), cart=(1, 9))
        shop.minute(1, web=(1, 9), cart=(10, 0))
        shop.minute(2, web=(1, 9))
        with shop.engine(rules_of(tmp_path, ERRORS)) as engine:
            for number in (0, 1):
                shop.over(number)
                engine.evaluate()
        with serving(url) as client:
            span: dict[str, Any] = {"from_": START_S, "to": ends(9)}
            answer = client.get("/api/v1/alerts", **span)
            assert answer["evaluated_s"] == ends(1)
            [rule] = answer["rules"]
            assert (rule["id"], rule["firing"], rule["pending"]) == ("errors", 1, 0)
            assert rule["condition"] == "service_sla / 100 < 95 in 1 minute"
            [alert] = answer["alerts"]
            web = service_id("web", True)
            entity = [
                alert[key] for key in ("entity_id", "entity_name", "entity_kind", "service_id")
            ]
            assert entity == [web, "web", "service", web]
            assert (alert["phase"], alert["since_s"], alert["value"]) == ("firing", ends(0), 10)
            times = [
                (one["entity_name"], one["starts_s"], one["ends_s"]) for one in answer["history"]
            ]
            assert times == [("cart", ends(0), ends(1)), ("web", ends(0), None)]
            own = client.get("/api/v1/alerts", entity="cart", **span)
            assert own["alerts"] == []
            assert [one["entity_name"] for one in own["history"]] == ["cart"]
            before = client.get("/api/v1/alerts", from_=START_S - 600, to=START_S)
            assert before["history"] == []
            one = client.get("/api/v1/alerts", limit=1, **span)
            assert (len(one["history"]), one["more"]) == (1, True)


def test_the_api_says_what_kind_of_entity_an_alert_is_about(tmp_path: Path) -> None:
    """Every kind has a page of its own, to which the alert links."""
    kinds = {
        "endpoint": "endpoint",
        "service_instance": "instance",
        "service_relation_server": "service_relation",
        "service": "service",
    }
    rules = "".join(
        f'[[rule]]\nname = "{name}"\nexpression = "{name}_cpm"\ncomparison = "> 0"\n'
        for name in kinds
    )
    url = f"sqlite:///{tmp_path}/store.db"
    with open_store(url) as store:
        shop = Shop(store)
        shop.writer.write([Call("web", START_S + 60 * n, caller="gate") for n in range(2)])
        with shop.engine(rules_of(tmp_path, rules)) as engine:
            shop.over(0)
            engine.evaluate()
        with serving(url) as client:
            answer = client.get("/api/v1/alerts", from_=START_S, to=ends(9))
    assert {alert["rule"]: alert["entity_kind"] for alert in answer["alerts"]} == kinds
    services = {alert["service_id"] for alert in answer["alerts"]}
    assert services == {service_id("web", True)}


def evaluate(store: Store, folder: Path) -> None:
    """Evaluate the rules on the hour of known calls, minute by minute."""
    (folder / "alerts.toml").write_text(RULES)
    times = [BEGIN + 80.0]
    engine = AlertEngine(
        store,
        load_rules(folder / "alerts.toml").rules,
        settings=AlertSettings(),
        clock=lambda: times[-1],
    )
    with engine:
        engine.evaluate()
        times.append(BEGIN + 3700.0)
        engine.evaluate()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for all tests."""
    with running_chromium() as chromium:
        yield chromium


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server on a store with alerts."""
    folder = tmp_path_factory.mktemp("alerts")
    with filled_store(folder) as (url, store, _):
        evaluate(store, folder)
        with serving_all(url) as server:
            yield server.address


@pytest.fixture(scope="module")
def tab(browser: Browser, address: str) -> Iterator[Watched]:
    """A page of that server."""
    with watched_page(browser, address) as watched:
        yield watched


@pytest.fixture
def seen(tab: Watched) -> Iterator[Watched]:
    """That page, as if it were new."""
    with reused_page(tab) as watched:
        yield watched


def test_the_page_shows_firing_pending_history_and_rules(seen: Watched) -> None:
    """Each in a table, the newest first; the entity leads to its own page."""
    page = seen.open(f"#/alerts?{OWN}")
    expect(page.locator("#alerts-firing")).to_be_visible()
    [firing] = table_rows(page, "Firing")
    assert firing[:3] == ["slow", "cart", "warning"]
    assert firing[4:] == ["700", "cart takes 700 ms"]
    assert sorted(row[:3] for row in table_rows(page, "Pending")) == [
        ["slow_endpoint", "POST /cart in cart", "warning"],
        ["slow_for_long", "cart", "warning"],
    ]
    history = table_rows(page, "History")
    assert [row[:3] for row in history] == [
        ["errors", "shop", "critical"],
        ["errors", "shop", "critical"],
        ["errors", "shop", "critical"],
        ["slow", "cart", "warning"],
    ]
    assert [row[5] for row in history[:3]] == ["60.0 s", "60.0 s", "60.0 s"]
    states = {row[0]: row[3] for row in table_rows(page, "Rules")}
    waiting = dict.fromkeys(("slow_endpoint", "slow_for_long"), "1 alert pending")
    assert states == {"errors": "ok", "slow": "1 alert firing", **waiting}
    tables = ("Firing", "Pending", "History", "Rules")
    in_every_form(page, "alerts", *(page.get_by_role("table", name=name) for name in tables))
    page.locator("nav a[data-page=alerts][aria-current=page]").wait_for()
    page.get_by_role("table", name="Firing").get_by_role("link", name="cart").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("cart")
    page.go_back()
    page.get_by_role("table", name="Pending").get_by_role("link", name="POST /cart in cart").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("POST /cart")
    assert "#/endpoint/" in page.url


def test_a_service_has_its_alerts_on_its_charts(seen: Watched) -> None:
    """The time in which an alert fired is drawn in its colour, listed, and said to readers."""
    page = seen.open(f"#/service/shop?{OWN}")
    chart = page.locator(".chart").first
    expect(chart).to_have_attribute("aria-label", re.compile("errors fired from .* to "))
    rows = table_rows(page, "Alerts in this time range")
    assert [row[0] for row in rows] == ["errors", "errors", "errors"]
    # The bar at the top of the marked time, in the colour of what is bad.
    script = """(chart) => {
        const canvas = chart.querySelector("canvas");
        const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        let bar = 0;
        for (let at = 0; at < data.length; at += 4) {
            const [red, green, blue] = data.slice(at, at + 3);
            if (red > 150 && green < 90 && blue < 90) bar += 1;
        }
        return bar;
    }"""
    assert chart.evaluate(script) > 50
    in_every_form(
        page, "service-alerts", chart, page.locator("section[aria-labelledby=list-alerts]")
    )
    page = seen.open(f"#/service/cart?from={BEGIN - 7200}&to={BEGIN - 3600}")
    expect(page.get_by_role("heading", level=1)).to_have_text("cart")
    expect(page.locator("section[aria-labelledby=list-alerts]")).to_be_hidden()


def test_without_rules_the_page_says_how_to_begin(browser: Browser, tmp_path: Path) -> None:
    """It names the setting and the command that checks a file."""
    with (
        filled_store(tmp_path) as (url, _, _),
        serving(url) as server,
        watched_page(browser, server.address) as watched,
    ):
        page = watched.open("#/alerts")
        expect(page.get_by_role("heading", level=2)).to_have_text("No alert rules")
        expect(page.get_by_text("batchmill alerts check FILE")).to_be_visible()
