"""The oracle's random data, and that the order of rows makes no difference."""

from __future__ import annotations

from collections import Counter
from datetime import datetime
from pathlib import Path

import pytest

from tests.oracle.catalog import Row, bucket_of, entity_of, load_catalog
from tests.oracle.generate import random_events, random_spans, write_segments
from tests.oracle.metrics import expected_metrics
from tests.oracle.spans import spans_to_events
from tests.oracle.topn import expected_topn


def test_random_data_is_the_same_for_the_same_seed() -> None:
    """A seed is all that the data depends on."""
    assert random_spans(1, 300) == random_spans(1, 300)
    assert random_spans(1, 300) != random_spans(2, 300)
    assert random_events(1, ["Service"], 50) == random_events(1, ["Service"], 50)
    assert (
        random_events(1, ["Service"], 50)["Service"]
        == random_events(1, ["Endpoint", "Service"], 50)["Service"]
    )


def test_random_spans_have_it_all() -> None:
    """Every kind of row, every kind of destination, and everything that cannot be resolved."""
    spans = random_spans(3, 3000)
    assert len(spans) == 3000
    assert len({(row["trace_id"], row["span_id"]) for row in spans}) == 3000
    events, counters = spans_to_events(spans)
    assert len(events) == 12
    layers = {row["destLayer"] for row in events["ServiceRelation"]}
    transmitted = {row["transmissionLatency"] for row in events["MQAccess"]}
    assert None in transmitted
    assert len(transmitted) > 10
    assert len(layers) == 6
    assert all(counters.values())
    assert len({key[0] for key in expected_topn(spans)}) == 4
    assert {row["operation"] for row in events["CacheAccess"]} == {"Read", "Write", "Others"}


def test_random_events_of_every_source_have_entities() -> None:
    """Any source of the catalog can be had, over several days, with nulls but not of latency."""
    catalog = load_catalog()
    events = random_events(5, catalog.fields, 60)
    for source, rows in events.items():
        assert len(rows) == 60
        assert len({entity_of(source, row) for row in rows}) > 1
        assert len({bucket_of(row["time"], "day") for row in rows}) > 1
        assert [row["time"] for row in rows] != sorted(row["time"] for row in rows)
        assert all(row.get("latency", 0) is not None for row in rows)
    assert any(row["status"] is None for row in events["Service"])


def test_segments_hold_what_was_written(tmp_path: Path) -> None:
    """Rows come back from Parquet as they were, in whichever file."""
    pytest.importorskip("pyarrow")
    from tests.oracle.generate import read_segments

    events = random_events(7, load_catalog().fields, 20) | {"Span": random_spans(7, 100)}
    paths = write_segments(events, tmp_path, 3, 1)
    assert len(paths) == 3 * len(events)
    assert paths[0] == tmp_path / sorted(events)[0] / "0.parquet"
    back = read_segments(tmp_path)
    assert set(back) == set(events)
    for source, rows in events.items():
        assert Counter(map(_text, rows)) == Counter(map(_text, back[source]))


def _text(row: Row) -> str:
    times = {key: value.isoformat() for key, value in row.items() if isinstance(value, datetime)}
    return repr(sorted((row | times).items()))


def test_metrics_do_not_depend_on_the_order_of_rows() -> None:
    """The same rows the other way round give the same values."""
    script = """
        a = from(Service.latency).percentile2(1);
        b = from(Service.*).labelCount(tag["region"], 1);
        c = from(Service.latency).filter(status == true).doubleAvg();
        d = from(Service.latency).apdex(name, status);
    """
    rows = random_events(11, ["Service"], 400)["Service"]
    there = expected_metrics(script, {"Service": rows})
    assert there == expected_metrics(script, {"Service": rows[::-1]})
    assert {key[0] for key in there} == {"a", "b", "c", "d"}
