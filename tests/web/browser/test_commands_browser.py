"""The commands that the explorer offers to copy are run by a shell: they print what it draws."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import pytest

import batchmill
from batchmill.oal import core_script
from batchmill.sources import given, source
from tests.kit.servers.browser import watched_page
from tests.web.pages_kit import serving

pytest.importorskip("playwright.sync_api")
pytest.importorskip("uvicorn")

from playwright.sync_api import expect

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [pytest.mark.slow(30), pytest.mark.system]

DAY = int(time.time()) // 86_400 * 86_400 - 2 * 86_400
"""The day that has all values; it is over."""
BEGIN = DAY + 10 * 3600
MINUTES = 150
HOURS = f"from={BEGIN}&to={BEGIN + 60 * MINUTES}"
AWKWARD = ("-1h", "it's $(worth) `it`", 'back\\slash "quoted"', "größe; exit 1")


@source(entity=given("plan"))
@dataclass(frozen=True)
class PlanSold:
    """An event type of a user's own, whose entities have the names that its users choose."""

    time: datetime
    plan: str
    country: str
    cents: int


OAL = f"""{core_script().read_text("utf-8")}
plan_cents = from(PlanSold.cents).longAvg();
plan_countries = from(PlanSold.*).labelCount(country);
"""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of a store, whose folder is the server's own and has a name with a space."""
    folder = tmp_path_factory.mktemp("a store")
    settings: dict[str, Any] = {"ttl_days": 3650, "close_timeout_s": 60}
    with batchmill.Embedded(oal=OAL, store=f"sqlite:///{folder}/m.db", **settings) as mill:
        for minute in range(MINUTES):
            at = datetime.fromtimestamp(BEGIN, UTC) + timedelta(minutes=minute)
            for number, plan in enumerate(AWKWARD):
                mill.emit(PlanSold(at, plan, "de" if minute % 3 else "fr", 100 * number + minute))
            for number in range(12 if minute == 0 else 1):
                called = {"name": f"shop-{number}", "layer": "GENERAL", "type": "HTTP"}
                took = {"latency": minute, "latencyMicros": 1000 * minute + 1, "status": True}
                mill.emit({"time": at, **called, **took}, "Service")
        mill.flush()
    relative = os.path.relpath(folder / "m.db")
    with serving(folder, f"--store=sqlite:///{relative}") as (served, _):
        yield served


def printed(commands: str, folder: Path) -> str:
    """What a shell prints that runs them, in a folder of no importance."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # As somebody would paste them: the shell goes on after one that fails, so that it must stop.
    done = subprocess.run(
        ["sh", "-e"],
        input=commands,
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), commands
    return done.stdout


SHOWN = {
    "a plain metric": {"metric": "service_cpm", "entity": "shop-0"},
    "percentiles": {"metric": "service_percentile_micros", "entity": "shop-0"},
    "labels": {"metric": "plan_countries", "entity": AWKWARD[1]},
    "some of many": {"metric": "service_resp_time", "entity": ["shop-0", "shop-11"]},
    "the largest of many": {"metric": "service_resp_time"},
    "names of users": {"metric": "plan_cents"},
    "names that are chosen": {"metric": "plan_cents", "entity": AWKWARD},
    "names that are searched for": {"metric": "plan_cents", "search": "slash"},
    "hours": {"metric": "plan_cents", "from": DAY, "to": DAY + 86_400},
    "hours of a rate": {"metric": "service_cpm", "from": DAY, "to": DAY + 86_400},
    "days": {"metric": "plan_cents", "from": DAY - 86_400, "to": DAY + 86_400, "grain": "day"},
    "a time up to now": {"metric": "plan_cents", "from": "now-4d", "to": "now-1m"},
}


@pytest.mark.parametrize("shown", SHOWN.values(), ids=SHOWN)
def test_a_copied_command_prints_the_values_that_are_drawn(
    browser: Browser, address: str, tmp_path: Path, shown: dict[str, Any]
) -> None:
    """As it was copied, in a shell: every entity and bucket that is drawn, and no others."""
    query = urlencode({"from": BEGIN, "to": BEGIN + 60 * MINUTES, **shown}, doseq=True)
    with watched_page(browser, address) as watched:
        page = watched.open(f"#/explore?{query}")
        expect(page.locator(".chart canvas")).to_be_visible()
        commands = page.locator(".copy code").nth(1).inner_text()
        path = [path for path in watched.requested if "/values?" in path][-1]
        answer = page.request.get(f"{address}{path}").json()
    drawn = {
        (series["entity_id"], at): value
        for series in answer["series"][:8]
        for at, value in zip(answer["times"], series["values"], strict=True)
        if value is not None
    }
    as_json = "\n".join(f"{command} --json" for command in commands.splitlines())
    lines = [json.loads(line) for line in printed(as_json, tmp_path).splitlines()]
    values = {
        (line["entity_id"], int(datetime.fromisoformat(line["time"]).timestamp())): line["value"]
        for line in lines
    }
    assert values == drawn
    titles = len(commands.splitlines())
    assert len(printed(commands, tmp_path).splitlines()) == len(drawn) + titles
