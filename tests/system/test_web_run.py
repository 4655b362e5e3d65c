"""The pages in front of a whole run: real traffic, real Spark, and processes that are killed."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.kit.jvm import java_missing, jvm_options
from tests.kit.servers.browser import (
    Watched,
    expect_value,
    keep_shot,
    record_live_states,
    running_chromium,
    table_rows,
    wait_for_live_state,
    watched_page,
)

pytest.importorskip("playwright.sync_api")
pytest.importorskip("pyspark")
pytest.importorskip("grpc")
pytest.importorskip("opentelemetry.sdk")
pytest.importorskip("uvicorn")

from playwright.sync_api import expect

from batchmill.files import read_json
from batchmill.oal import core_script
from batchmill.run import Home, read_counted
from batchmill.sources import Grain, bucket_end, bucket_start, split_entity_id
from batchmill.store import Store, open_store
from tests.kit.pipelines import QUICK_SPARK, write_segment
from tests.kit.processes import Life, pause_process, running_pid, wait_for_json
from tests.kit.spark import span
from tests.kit.threads import PATIENCE_S, until

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [
    pytest.mark.slow(45),
    pytest.mark.timeout(900),
    pytest.mark.skipif(java_missing() is not None, reason=java_missing() or ""),
]

SHOWN = re.compile(
    r"(service|endpoint)_(instance_|relation_(server|client)_)?(cpm|.*sla|apdex|"
    r"(resp_time|percentile)_micros)\b.*;"
)
"""The metrics that the pages show: a driver that was just started takes long for all of them."""


@pytest.fixture(autouse=True)
def no_stacks_on_the_way() -> None:
    """It takes minutes; pytest would print every thread's stack before its time is up."""
    faulthandler.cancel_dump_traceback_later()


@contextlib.contextmanager
def run_with(folder: Path, *options: str) -> Iterator[Home]:
    """A run with the metrics that are shown; killed in the end."""
    script = folder / "shown.oal"
    lines = core_script().read_text("utf-8").splitlines()
    script.write_text("\n".join(line for line in lines if SHOWN.match(line)))
    home = Home(folder / "home")
    command = [
        *(sys.executable, "-m", "batchmill", "run", *options),
        *(f"--home={home.folder}", "--http-port=0", "--grpc-port=0", "--web-port=0"),
        *("--master=local[2]", "--trigger=0.5", f"--oal={script}"),
        *(f"--conf={key}={value}" for key, value in QUICK_SPARK.items()),
    ]
    with Life(command, folder / "errors", os.environ | {"SPARK_SUBMIT_OPTS": jvm_options()}):
        yield home


class Traffic:
    """The demo's traffic, which comes when it is let: a busy machine is not to be flooded."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._pid = running_pid(home.supervisor, "demo")

    def some(self) -> None:
        """A few hundred spans more, acknowledged."""
        enough = self._acknowledged() + 300
        os.kill(self._pid, signal.SIGCONT)
        until(lambda: self._acknowledged() >= enough)
        pause_process(self._pid)

    def is_counted(self) -> bool:
        """Whether everything that was acknowledged is in the store."""
        return read_counted(self._home.store_url).spans == self._acknowledged()

    def _acknowledged(self) -> int:
        return int((read_json(self._home.ingest) or {}).get("acknowledged_spans", 0))


@dataclass(frozen=True)
class Figure:
    """A value of an entity: a number, or one for each label."""

    name: str
    value: Any


def of_day(store: Store, metric: str, day: int) -> dict[str, Figure]:
    """The values of a metric on a day, by the entity's id."""
    values = store.values(metric, grain=Grain.DAY, start=day, end=day)
    return {value.entity_id: Figure(value.entity_name, value.value) for value in values}


def expected_overview(store: Store, day: int) -> dict[str, list[str]]:
    """What the overview is to say of a day's services, but for calls per minute."""
    average, p99, success, apdex = (
        of_day(store, f"service_{suffix}", day)
        for suffix in ("resp_time_micros", "percentile_micros", "sla", "apdex")
    )
    return {
        figure.name: [
            shown_ms(figure.value),
            shown_ms(next(n for label, n in p99[id_].value.items() if "99" in label)),
            f"{success[id_].value / 100:.2f} %",
            f"{apdex[id_].value // 100 / 100:.2f}",
        ]
        for id_, figure in average.items()
    }


def shown_ms(micros: int) -> str:
    """As the pages write microseconds."""
    n = Decimal(micros) / 1000
    if n >= 1000:
        return f"{_rounded(n / 1000, 2)} s"
    decimals = 0 if n >= Decimal("9.95") or micros % 1000 == 0 else 1
    return f"{_rounded(n, 2 if n < Decimal('0.995') else decimals)} ms"


def _rounded(n: Decimal, decimals: int) -> Decimal:
    return n.quantize(Decimal(1).scaleb(-decimals), ROUND_HALF_UP)


def fact(page: Page, stage: str, name: str) -> str:
    """A number of a stage."""
    box = page.locator(".stage", has=page.get_by_role("heading", name=stage, exact=True))
    return box.locator("dl > div", has_text=name).locator("dd").inner_text()


@contextlib.contextmanager
def changing(page: Page, *facts: tuple[str, str]) -> Iterator[None]:
    """Numbers of stages that must change, without a reload, after what is done meanwhile."""
    before = {place: fact(page, *place) for place in facts}
    yield
    for place, was in before.items():
        until(lambda place=place, was=was: fact(page, *place) != was)  # type: ignore[misc]


STAGE_NUMBERS = (("Ingest", "Acknowledged"), ("Store", "Spans"), ("Spark", "Batch"))


def test_the_pages_of_a_whole_run(tmp_path: Path) -> None:
    """They go live, show what the store has, and survive the death of pipeline and server."""
    demo = ("--demo=forever", "--demo-seed=7")
    with running_chromium() as browser, run_with(tmp_path, *demo) as home:
        address = wait_for_json(home.web, "address")
        with watched_page(browser, address) as seen:
            # Until the first commit there is no store, and that is said.
            seen.expected = ("503",)
            traffic = Traffic(home)
            _goes_live(seen, traffic)
            until(traffic.is_counted)
            _shows_what_the_store_has(seen, home)
            seen.expected = ("503", "net::ERR_")
            _survives(seen, home, traffic)


def _goes_live(seen: Watched, traffic: Traffic) -> None:
    """What the first commit brings shows without a reload; so do the numbers of the stages."""
    page = seen.open("#/services")
    page.locator("#live[data-state=live]").wait_for()
    traffic.some()
    page.locator("table.services tbody tr").first.wait_for(timeout=PATIENCE_S * 1000)
    page.get_by_role("link", name="Pipeline").click()
    page.locator(".bars rect:visible").first.wait_for()
    page.wait_for_function("document.querySelectorAll('.stage[data-state=good]').length >= 3")
    with changing(page, *STAGE_NUMBERS):
        traffic.some()
    keep_shot(page, "whole-pipeline")


def _shows_what_the_store_has(seen: Watched, home: Home) -> None:
    """Everything is counted, no more comes, and each page is compared."""
    with open_store(home.store_url, create=False) as store:
        day = (store.newest_minute() or 0) // 10_000
        begin, end = (int(at.timestamp()) for at in (bucket_start(day), bucket_end(day)))
        _compare(seen, store, day, f"from={begin}&to={end}&grain=day")


def _compare(seen: Watched, store: Store, day: int, range_: str) -> None:
    page = seen.open(f"#/services?{range_}")
    # A minute that may still grow is in no total: wait until none is.
    expected = expected_overview(store, day)

    def shown() -> dict[str, list[str]]:
        page.reload()
        page.locator("table.services tbody tr").first.wait_for()
        return {name: rest[1:] for name, *rest in table_rows(page, "Services")}

    until(lambda: shown() == expected, "the totals of all minutes")
    keep_shot(page, "whole-overview")
    calls = of_day(store, "service_cpm", day)
    busiest = max(of_day(store, "service_resp_time_micros", day), key=lambda id_: calls[id_].value)
    page = seen.open(f"#/service/{busiest}?{range_}")
    name = calls[busiest].name
    page.get_by_role("heading", name=name, level=1).wait_for()
    times = {
        figure.name: shown_ms(figure.value)
        for id_, figure in of_day(store, "endpoint_resp_time_micros", day).items()
        if id_.startswith(f"{busiest}_")
    }
    expect_value(page, lambda: {row[0]: row[2] for row in table_rows(page, "Endpoints")}, times)
    page = seen.open(f"#/topology?{range_}")
    relations = {
        split_entity_id("service_relation", id_)
        for side in ("server", "client")
        for id_ in of_day(store, f"service_relation_{side}_cpm", day)
    }
    expect_value(
        page,
        lambda: {tuple(row[:2]) for row in table_rows(page, "Calls between services")},
        relations,
    )
    expect(page.locator(".map .edge")).to_have_count(len(relations))
    keep_shot(page, "whole-topology")


def _survives(seen: Watched, home: Home, traffic: Traffic) -> None:
    """The pipeline is killed, then the server: the page says so, and goes on."""
    page = seen.open("#/pipeline")
    page.locator(".bars rect:visible").first.wait_for()
    killed = running_pid(home.supervisor, "pipeline")
    os.kill(killed, signal.SIGKILL)
    page.locator(".reasons", has_text="pipeline is").wait_for()
    with changing(page, *STAGE_NUMBERS):
        traffic.some()
    process = page.get_by_role("table", name="Processes").locator("tr", has_text="pipeline")
    expect(process).to_contain_text("SIGKILL")
    record_live_states(page)
    os.kill(running_pid(home.supervisor, "web"), signal.SIGKILL)
    wait_for_live_state(page, "reconnecting")
    page.locator("#live[data-state=live]").wait_for(timeout=PATIENCE_S * 1000)
    with changing(page, ("Ingest", "Acknowledged")):
        traffic.some()


SEGMENTS = 2000
"""A backlog of several batches: the first takes 8 MiB, and a file counts for 32 KiB at least."""
EACH = 20


def fill(spool: Path) -> None:
    """What a receiver wrote while no pipeline ran: many segments with the same spans."""
    begin = datetime.now(UTC) - timedelta(hours=1)
    spans = [
        span(f"{number:016x}", trace_id=f"{number:032x}", time=begin, end_time=begin)
        for number in range(EACH)
    ]
    order = time.time_ns() // 1000 - 10**9
    first = write_segment(spool, "Span", spans, f"{order}-{0:08x}-{EACH}")
    for number in range(1, SEGMENTS):
        os.link(first, first.with_name(f"{order + number}-{number:08x}-{EACH}.parquet"))


def test_the_pipeline_page_over_a_backlog(tmp_path: Path) -> None:
    """A spool filled while nothing ran: the page says how much is left, and for how long.

    It says what ``/api/v1/pipeline`` does, which is what lies in the spool; until none is left.
    """
    spool = Home(tmp_path / "home").spool
    fill(spool)
    options = ("--dedup=off", "--keep-spans=off")
    with running_chromium() as browser, run_with(tmp_path, *options) as home:
        address = wait_for_json(home.web, "address")
        with watched_page(browser, address) as seen:
            seen.expected = ("503",)  # until the first commit there is no store
            page = seen.open("#/pipeline")
            pid = running_pid(home.supervisor, "pipeline")
            # A few batches are done, which tell the pace, and as many are left.
            wait_for_json(home.progress, "catch_up_s")
            pause_process(pid)
            left = EACH * len(list(spool.glob("Span/*.parquet")))
            assert 0 < left < EACH * SEGMENTS

            def compared() -> bool:
                # The server reads the spool anew every second or so.
                behind = page.evaluate(BEHIND)
                return behind["rows"] == left and shown_backlog(page) == expected_backlog(behind)

            page.locator(".stage", has_text="Behind").wait_for()
            until(compared, lambda: f"{shown_backlog(page)} is {page.evaluate(BEHIND)}")
            keep_shot(page, "whole-backlog")
            os.kill(pid, signal.SIGCONT)
            until(lambda: page.evaluate(BEHIND) is None, timeout_s=4 * PATIENCE_S)
            expect_value(page, lambda: bool(shown_backlog(page)), False)
            expect_value(page, lambda: fact(page, "Store", "Spans"), f"{EACH * SEGMENTS:,}")
            assert read_counted(home.store_url).spans == EACH * SEGMENTS
            assert list(spool.glob("Span/*.parquet")) == []


BEHIND = "fetch('/api/v1/pipeline').then(answer => answer.json()).then(state => state.behind)"


def shown_backlog(page: Page) -> list[str]:
    """What the page says of a backlog now; nothing if there is none."""
    box = page.locator(".stage", has=page.get_by_role("heading", name="Spool", exact=True))
    return box.locator("dl > div").all_inner_texts()[3:]


def expected_backlog(behind: Mapping[str, Any] | None) -> list[str]:
    """The same, of what the API says."""
    if behind is None:
        return []
    catch_up_s, new_lag_s = behind["catch_up_s"], behind["new_lag_s"]
    return [
        f"Behind\n{behind['rows']:,} {behind['unit']}s",
        f"Caught up\n{'not known' if catch_up_s is None else f'in {shown_seconds(catch_up_s)}'}",
        f"New data waits\n{'not known' if new_lag_s is None else shown_seconds(new_lag_s)}",
    ]


def shown_seconds(seconds: float) -> str:
    """As the pages write them, up to ten minutes."""
    s = Decimal(str(seconds))
    if s < 1:
        return f"{_rounded(s * 1000, 0)} ms"
    return f"{_rounded(s, 1)} s" if s < 100 else f"{_rounded(s / 60, 1)} min"
