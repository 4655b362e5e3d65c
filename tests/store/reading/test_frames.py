"""Values as Arrow tables and as DataFrames of pandas; grains by their words."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from batchmill import ConfigError
from batchmill.sources import Grain, UnknownNameError
from batchmill.store import Selection, frame_schema
from tests.kit.stores import MINUTE, Backend, Measurement, Writer


@pytest.mark.parametrize("grain", Grain)
def test_grain_may_be_a_word(backend: Backend, grain: Grain) -> None:
    """Wherever a grain is given, and in a selection that is made first."""
    store = backend.open()
    Writer(store).write(Measurement(5))
    word = grain.value
    assert store.values("calls", grain=word) == store.values("calls", grain=grain) != []
    assert list(store.iter_values("calls", grain=word)) == store.values("calls", grain=grain)
    assert store.count_values("calls", grain=word) == 1
    assert store.states("calls", grain=word) == store.states("calls", grain=grain)
    bucket = store.values("calls", grain=grain)[0].bucket
    assert store.bucket_values(bucket, grain=word) == store.bucket_values(bucket, grain=grain)
    assert store.top("none", grain=word) == []
    assert Selection(grain=word).grain is grain  # type: ignore[arg-type]


def test_grain_that_is_none_is_refused(backend: Backend) -> None:
    """The message has the words that are allowed."""
    with pytest.raises(ConfigError, match=r"grain='hours' .* 'minute' or 'hour' or 'day'"):
        backend.open().values("calls", grain="hours")


def test_table_has_a_row_for_each_number(backend: Backend) -> None:
    """Plain columns, a moment as time, and a row for each label of a metric that has labels."""
    store = backend.open()
    Writer(store).write(Measurement(12), Measurement(34, entity="two"))
    table = store.to_arrow("calls", "percentile", grain="hour")
    assert table.schema == frame_schema()
    calls, percentile = table.to_pylist()[0], table.to_pylist()[2]
    assert calls == {
        "metric": "calls",
        "source": "Endpoint",
        "entity_id": "id-one",
        "entity_name": "one",
        "layers": ["GENERAL"],
        "grain": "hour",
        "time": datetime(2024, 3, 1, 12, tzinfo=UTC),
        "label": None,
        "value": 1.0,
    }
    assert (percentile["label"], percentile["value"]) == ("{p=50}", 10.0)
    assert table.num_rows == 2 + 2 * 5


def test_table_without_names_has_all_metrics(backend: Backend) -> None:
    """Those that are computed, selected like values."""
    store = backend.open()
    writer = Writer(store)
    writer.write(Measurement(12), Measurement(3, minute=MINUTE + 1))
    table = store.to_arrow(start=MINUTE + 1, entity="one")
    assert set(table["metric"].to_pylist()) == {metric.name for metric in writer.metrics}
    assert set(table["time"].to_pylist()) == {datetime(2024, 3, 1, 12, 1, tzinfo=UTC)}


def test_rate_is_divided_by_the_minutes_with_data(backend: Backend) -> None:
    """With ``covered``, as of values; else by all minutes of the hour."""
    store = backend.open()
    calls = [Measurement(1, minute=MINUTE + at) for at in range(12) for _ in range(10)]
    Writer(store, script="cpm = from(Endpoint.*).cpm();").write(*calls)
    for covered, rate in ((True, 10.0), (False, 2.0)):
        assert store.to_arrow("cpm", grain="hour", covered=covered)["value"].to_pylist() == [rate]


def test_empty_table_has_its_columns(backend: Backend) -> None:
    """Nothing is selected, but a name that does not exist is an error."""
    store = backend.open()
    Writer(store)
    assert store.to_arrow("calls").schema == frame_schema()
    with pytest.raises(UnknownNameError, match="calls"):
        store.to_arrow("cals")


def test_frame_of_pandas_is_the_same(backend: Backend) -> None:
    """Ready to be pivoted."""
    pytest.importorskip("pandas")
    store = backend.open()
    Writer(store).write(Measurement(12), Measurement(3, minute=MINUTE + 1))
    frame = store.to_pandas("calls", "slowest")
    wide = frame.pivot_table(index="time", columns="metric", values="value")
    assert wide["calls"].tolist() == [1.0, 1.0]
    assert wide["slowest"].tolist() == [12.0, 3.0]
