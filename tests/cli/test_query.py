"""``batchmill query``: what it shows, and what it says when there is nothing to show."""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from batchmill.cli.query import add_parser, run
from batchmill.cli.query_view import Unit, blocks
from batchmill.oal import load
from batchmill.run import Home
from batchmill.sources import Grain, service_id
from batchmill.store import (
    Deltas,
    EntityRow,
    StatementRow,
    StoredMetric,
    TopNRow,
    minute_of,
    open_store,
)
from tests.kit.stores import MINUTE, Measurement, Writer, entity_row
from tests.kit.threads import PATIENCE_S


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A store with an hour and a bit of two endpoints."""
    url = f"sqlite:///{tmp_path}/store.db"
    with open_store(url) as store:
        writer = Writer(store)
        minutes = [*range(MINUTE, MINUTE + 60), *range(MINUTE + 100, MINUTE + 110)]
        writer.write(
            *(Measurement(m % 70, minute=m) for m in minutes),
            *(Measurement(5, name="[b]", minute=m, entity="/cart[x]") for m in minutes[:3]),
            topn=[TopNRow("db", 1, MINUTE, 300, 1, "abc", "s", "select 1", "select ?")],
            statements=[StatementRow("db", 1, MINUTE, "select ?", 4, 900)],
        )
        writer.write(entities=[entity_row("/cart[x]", ["MESH"])])
    return url


def query(*arguments: str) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    return run(parser.parse_args(["query", *arguments]))


def rows(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """What was printed, line by line."""
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_table_is_the_default(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Time, entity and value, with names as they are and the newest rows at the end."""
    assert query("calls", "--store", url, "--entity", "/cart[x]") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["time", "entity", "value"]
    assert lines[1].split() == ["2024-03-01", "12:00", "/cart[x]", "1"]
    assert len(lines) == 4


def test_the_store_is_found_from_the_home_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `batchmill status` finds the run."""
    home = Home(tmp_path)
    with open_store(home.store_url) as store:
        Writer(store).write(Measurement(7))
    assert query("calls", "--home", str(tmp_path)) == 0
    assert "2024-03-01 12:00" in capsys.readouterr().out


def test_a_home_without_a_store_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the options that name another."""
    assert query("calls", "--home", str(tmp_path)) == 1
    said = capsys.readouterr().err
    assert f"there is no store at sqlite:///{tmp_path}/metrics.db" in said
    assert "--home names the folder of another run, --store a store" in said


def test_a_database_that_cannot_be_reached_is_given_up_after_seconds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nothing listens on that port; the message says what was tried."""
    pytest.importorskip("psycopg")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    started = time.monotonic()
    assert query("calls", "--store", f"postgresql://nobody@127.0.0.1:{port}/none") == 1
    assert time.monotonic() - started < PATIENCE_S / 5
    assert "Check that the database runs and can be reached" in capsys.readouterr().err


def test_a_labelled_metric_has_a_column_for_each_label(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Percentiles stand side by side."""
    assert query("percentile", "--store", url, "--limit", "1") == 0
    out = capsys.readouterr().out
    assert all(f"{{p={rank}}}" in out.splitlines()[0] for rank in (50, 75, 90, 95, 99))
    assert "the newest 1 of 73 values" in out


@pytest.mark.parametrize("how", [["--json"], ["--chart"], []], ids=["json", "chart", "table"])
def test_a_limit_may_be_any_number(
    url: str, capsys: pytest.CaptureFixture[str], how: list[str]
) -> None:
    """More than there is, or more than a database can count, is all there is."""
    assert query("calls", "--store", url, "--limit", str(10**30), *how) == 0
    assert "the newest" not in capsys.readouterr().out


def test_a_chart_of_the_newest_says_so(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Below the chart stands how many values there are."""
    assert query("calls", "--store", url, "--chart", "--limit", "5") == 0
    *_, span, said = capsys.readouterr().out.splitlines()
    assert span == "2024-03-01 13:05 to 2024-03-01 13:09; ▁ is 0, █ is 1"
    assert said == "the newest 5 of 73 values; --limit 73 shows all"


def test_json_is_one_object_a_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every line can be read by itself, and holds everything that is known of a value."""
    assert query("avg", "--store", url, "--json", "--layer", "MESH", "--limit", "1") == 0
    assert rows(capsys) == [
        {
            "metric": "avg",
            "grain": "minute",
            "bucket": MINUTE + 2,
            "time": "2024-03-01T12:02:00+00:00",
            "entity_id": "id-/cart[x]",
            "entity_name": "/cart[x]",
            "layers": ["GENERAL", "MESH"],
            "value": 5,
            "complete": True,
        }
    ]


@pytest.mark.parametrize(
    ("bounds", "first", "last", "count"),
    [
        (["--from", "-9m"], MINUTE + 100, MINUTE + 109, 10),
        (["--from", "-1h"], MINUTE + 9, MINUTE + 109, 61),
        (["--to", "202403011201"], MINUTE, MINUTE + 1, 2),
        (["--from", "2024-03-01T13:05", "--to", "2024-03-01T15:06+02:00"], MINUTE + 105, 0, 2),
        (["--from", "2024030113"], MINUTE + 100, MINUTE + 109, 10),
        (["--from", "2024-03-01", "--to", "2024-03-01"], MINUTE, MINUTE + 109, 70),
    ],
)
def test_times_are_written_in_many_ways(
    url: str,
    capsys: pytest.CaptureFixture[str],
    bounds: list[str],
    first: int,
    last: int,
    count: int,
) -> None:
    """Relative to the newest bucket, as a bucket of any grain, or as an ISO time in any zone."""
    assert query("calls", "--store", url, "--json", "--entity", "one", *bounds) == 0
    buckets = [row["bucket"] for row in rows(capsys)]
    assert (buckets[0], buckets[-1], len(buckets)) == (first, last or first + 1, count)


def test_times_at_the_ends_of_the_calendar(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The last day there is ends with its last minute, in every way to write it."""
    ends = ("9999-12-31", "99991231", "999912312359", "9999-12-31T23:59", "0001-01-01T00:00")
    for end in ends[:-1]:
        assert query("calls", "--store", url, "--json", "--from", ends[-1], "--to", end) == 0
        assert len(rows(capsys)) == 73


def test_hours_and_days_can_be_selected(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--grain picks the table."""
    assert query("calls", "--store", url, "--json", "--entity", "one", "--grain", "hour") == 0
    assert [row["value"] for row in rows(capsys)] == [60, 10]


def test_a_rate_is_divided_by_the_minutes_with_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ten calls in each of twelve minutes are ten a minute: of an hour and of a day, too."""
    url = f"sqlite:///{tmp_path}/rates.db"
    calls = [Measurement(1, minute=MINUTE + 30 + at) for at in range(12) for _ in range(10)]
    with open_store(url) as store:
        Writer(store, script="cpm = from(Endpoint.*).cpm();").write(*calls)
    for grain, count in (("minute", 12), ("hour", 1), ("day", 1)):
        assert query("cpm", "--store", url, "--json", "--grain", grain) == 0
        assert [row["value"] for row in rows(capsys)] == [10] * count


def test_a_chart_is_a_line_for_each_entity(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Name, blocks, and the figures; below it from when to when."""
    assert query("slowest", "--store", url, "--chart", "--from", "-1h") == 0
    (line, axis, span) = capsys.readouterr().out.splitlines()
    assert line.startswith("one ")
    assert "█" in line
    assert "min 0 max 69 last " in line
    assert axis.startswith("    └12:09─")
    assert span == "2024-03-01 12:09 to 2024-03-01 13:09; ▁ is 0, █ is 69 ms"


def test_a_chart_has_a_line_for_each_label(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A labelled metric's labels are drawn one below the other."""
    assert query("percentile", "--store", url, "--chart", "--entity", "one") == 0
    assert len(capsys.readouterr().out.splitlines()) == 7


def test_a_bucket_that_is_filling_is_marked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is not on the scale of the chart, nor the last value; one that is alone is."""
    now_s = time.time()
    minute, before = (minute_of(now_s - 60 * ago) for ago in (0, 5))
    url = f"sqlite:///{tmp_path}/store.db"
    with open_store(url) as store:
        writer = Writer(store)
        writer.write(*(Measurement(1, minute=minute, entity=name) for name in ("a", "a", "new")))
        writer.write(Measurement(1, minute=before, entity="a"))
    assert query("calls", "--store", url, "--chart") == 0
    old, new, _, span = capsys.readouterr().out.splitlines()
    assert old == "a   █    ░ min 1 max 1 last 1"
    assert new == "new      ░ min 1 max 1 last 1"
    assert span.endswith("▁ is 0, █ is 1, ░ is still filling")
    assert query("calls", "--store", url, "--chart", "--from", str(minute)) == 0
    assert capsys.readouterr().out.splitlines()[0] == "a   ░ min 2 max 2 last 2"
    assert query("calls", "--store", url, "--entity", "a") == 0
    heading, *lines = [line.split()[3:] for line in capsys.readouterr().out.splitlines()]
    assert (heading, lines) == (["filling"], [["1"], ["2", "░"]])
    for limit in ([], ["--limit", "2"]):
        assert query("calls", "--store", url, "--entity", "a", "--json", *limit) == 0
        assert [row["complete"] for row in rows(capsys)] == [True, False]


def test_blocks_fit_into_the_width() -> None:
    """Each place is the greatest of its share; what is missing is a gap; all equal is full."""
    assert blocks([0, 5, None, 10], 10) == "▁▄ █"
    assert blocks(list(range(100)), 4) == "▂▄▆█"
    assert blocks([3, 3], 5) == "██"
    assert blocks([None], 5) == " "
    assert blocks([-10, 0], 5) == "▁█"


def test_metrics_are_listed(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--list shows every metric, with its definition."""
    assert query("--list", "--store", url) == 0
    assert "from(Endpoint.latency).longAvg()" in capsys.readouterr().out
    assert query("--list", "--store", url, "--json") == 0
    assert len(rows(capsys)) == 7


def test_slow_calls_are_shown(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--top shows records, with how often the statement ran."""
    assert query("--top", "db", "--store", url) == 0
    assert "select 1" in capsys.readouterr().out
    assert query("--top", "db", "--store", url, "--json", "--grain", "day") == 0
    (record,) = rows(capsys)
    assert (record["latency"], record["runs"], record["total_ms"]) == (300, 4, 900)


def test_an_unknown_metric_names_close_ones(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, and what may be meant; the same for a TopN stream."""
    assert query("call", "--store", url) == 2
    assert "did you mean calls?" in capsys.readouterr().err
    assert query("--top", "dbs", "--store", url) == 2
    assert "did you mean db?" in capsys.readouterr().err


def test_no_rows_is_a_message(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing found is no error, but is said, beside the output."""
    assert query("calls", "--store", url, "--entity", "nobody", "--json") == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "no values of calls by minute for entity nobody" in captured.err
    assert query("--top", "db", "--store", url, "--from", "20250101") == 0
    assert "no records of db" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["calls", "--from", "soon"], 2, "--from='soon'"),
        (["calls", "--to", "20241399"], 2, "--to='20241399'"),
        (["calls", "--from", "0001-01-01T00:00+05:00"], 2, "the calendar has"),
        (["calls", "--to", "9999-12-31T23:00-05:00"], 2, "the calendar has"),
        (["calls", "--from", "0001-01-01"], 2, "from the year 1000 on"),
        (["calls", "--from", "-99999999999d"], 2, "the calendar has"),
        (["calls", "--from", f"-{'9' * 5000}m"], 2, "--from="),
        (["calls", "--list"], 2, "one of them"),
        ([], 2, "name a metric"),
    ],
)
def test_a_wrong_query_is_reported(
    url: str,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    """What cannot be understood is named, with what is allowed."""
    assert query(*arguments, "--store", url) == code
    assert message in capsys.readouterr().err


def test_a_wrong_store_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A store that is not there is not made; an address that is none is a wrong query."""
    assert query("calls", "--store", f"sqlite:///{tmp_path}/none.db") == 1
    assert "there is no store" in capsys.readouterr().err
    assert not (tmp_path / "none.db").exists()
    assert query("calls", "--store", "none.db") == 2
    open_store(f"sqlite:///{tmp_path}/empty.db").close()
    assert query("--list", "--store", f"sqlite:///{tmp_path}/empty.db") == 0
    assert "no metrics yet" in capsys.readouterr().err


RELATIONS = """
sla = from(ServiceRelation.*).percent(status == true);
resp_time = from(ServiceRelation.latency).longAvg();
"""
CALLER, CALLEE = "the-gateway-of-the-shop", "the-payments-of-the-shop"


@pytest.fixture
def relation(tmp_path: Path) -> str:
    """A store with one relation: three of four calls were successful, and took 7 ms."""
    url = f"sqlite:///{tmp_path}/relations.db"
    with open_store(url) as store:
        writer = Writer(store, script=RELATIONS)
        id_ = f"{service_id(CALLER, True)}-{service_id(CALLEE, True)}"
        entity = EntityRow("service_relation", id_, CALLEE, frozenset(), {})
        columns = [*writer.layout.columns["sla"], *writer.layout.columns["resp_time"]]
        cells: dict[str, list[Any]] = {
            column: [cell] for column, cell in zip(columns, (3, 4, 28, 4), strict=True)
        }
        deltas = Deltas("ServiceRelation", Grain.MINUTE, [MINUTE], [0], cells)
        writer.write(entities=[entity], deltas=[deltas], newest_minute=MINUTE)
    return url


def test_a_share_is_shown_as_percent(relation: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The heading has the unit; both ends of the relation are named."""
    assert query("sla", "--store", relation) == 0
    heading, row = capsys.readouterr().out.splitlines()
    assert heading.split("  ")[-1].strip() == "value (%)"
    assert row.split("  ")[1] == f"{CALLER} → {CALLEE}"
    assert row.endswith(" 75.00")


def test_a_table_has_the_unit_of_what_was_measured(
    relation: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Latencies are milliseconds."""
    assert query("resp_time", "--store", relation) == 0
    heading, row = capsys.readouterr().out.splitlines()
    assert heading.endswith("value (ms)")
    assert row.endswith(" 7")


@pytest.mark.parametrize(
    ("measured", "unit"),
    [
        ("EndpointRelation.rpcLatency).longAvg()", "ms"),
        ("MQAccess.transmissionLatency).max()", "ms"),
        ("GenAIModelAccess.timeToFirstToken).filter(timeToFirstToken > 0).longAvg()", "ms"),
        ('(str->long)Service.tag["http.code"]).longAvg()', ""),
        ('(str->long)Service.tag["duration_ms"]).longAvg()', "ms"),
        ("Service.latencyMicros).percentileLog()", "µs"),
        ("ServiceInstanceJVMGC.time).filter(phase == GCPhase.NEW).sum()", "ms"),
        ("ServiceInstanceJVMMemory.used).filter(heapStatus == true).longAvg()", "bytes"),
        ("ServiceInstanceJVMCPU.usePercent).doubleAvg()", "%"),
        ("ServiceInstanceJVMThread.liveCount).longAvg()", ""),
        ("Service.*).cpm()", "per min"),
        ("Service.*).percent(status == true)", "%"),
        ("Service.latency).apdex(name, status)", ""),
        ("Service.*).count()", ""),
    ],
)
def test_every_metric_that_has_a_unit_is_shown_with_it(measured: str, unit: str) -> None:
    """By its function, or by what it measures; the web UI asks the same function."""
    [metric] = load(f"m = from({measured};")
    stored = StoredMetric(
        *("m", 1, metric.source, metric.definition, metric.function, None),
        *((), None, True, False, mock.ANY),
    )
    assert Unit.of(stored).name == unit


def test_a_chart_names_both_ends_of_a_relation(
    relation: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Something of each, where there is no room for both; the scale is in percent."""
    assert query("sla", "--store", relation, "--chart") == 0
    line, axis, span = capsys.readouterr().out.splitlines()
    assert line == "the-gateway-o… → the-payments-… █ min 75.00 max 75.00 last 75.00"
    assert axis.strip() == "└12:00"
    assert span.endswith("▁ is 0.00, █ is 75.00 %")


def test_a_table_is_not_wrapped_in_a_pipe(tmp_path: Path) -> None:
    """A row is a line, however long its entity's name is."""
    url, name = f"sqlite:///{tmp_path}/store.db", "/a-long-path" * 20
    with open_store(url) as store:
        Writer(store).write(Measurement(1, entity=name))
    done = subprocess.run(
        [sys.executable, "-m", "batchmill", "query", "calls", "--store", url],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    heading, row = done.stdout.splitlines()
    assert heading.startswith("time ")
    assert row.split() == ["2024-03-01", "12:00", name, "1"]
