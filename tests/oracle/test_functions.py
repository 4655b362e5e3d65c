"""The oracle's functions, against figures worked by hand."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from tests.oracle.functions import Value, truncated
from tests.oracle.kit import NOON, service, services, value_of, values_of


def test_truncation() -> None:
    """Integer division goes toward zero."""
    assert [truncated(n, 2) for n in (7, -7, 6, -6, 0)] == [3, -3, 3, -3, 0]


@pytest.mark.parametrize(
    ("formula", "values", "result"),
    [
        ("longAvg()", [5, 2, None], 3),
        ("longAvg()", [-5, -2], -3),
        ("doubleAvg()", [5, 2], 3.5),
        # In doubles added one by one the 1 is lost: 1e16 + 1 = 1e16.
        ("doubleAvg()", [1e16, 1.0, -1e16], 1 / 3),
        ("sum()", [1e16, 1.0, -1e16, None], 1.0),
        ("sum()", [2**62, 2**62, -1], 2**63 - 1),
        ("max()", [-3, -1], 0),
        ("max()", [-3, 4, None], 4),
        ("maxDouble()", [-0.5], 0.0),
        ("maxDouble()", [0.25, 1.5], 1.5),
        ("min()", [-3, 4, None], -3),
        ("minDouble()", [0.25, 1.5], 0.25),
        ("count()", [1, None, 3], 3),
        ("percent(latency > 1)", [1, 2, 3], 6666),
        ("percent(latency != 1)", [1, None, 3], 3333),
        ("rate(latency > 1, latency > 2)", [1, 2, 3], 20000),
        ("rate(latency > 1, latency > 9)", [1, 2, 3], 0),
    ],
)
def test_plain_functions(formula: str, values: list[Any], result: Value) -> None:
    """One number per bucket, nulls left out where the value is measured."""
    value = value_of(f"from(Service.latency).{formula}", services("latency", values))
    assert (value, type(value)) == (result, type(result))


def test_cpm_is_per_minute_of_the_bucket() -> None:
    """61 calls of one minute: 61 a minute, 61 / 60 = 1, 61 / 1440 = 0."""
    rows = [service()] * 61
    formula = "from(Service.*).cpm()"
    assert [value_of(formula, rows, grain=g) for g in ("minute", "hour", "day")] == [61, 1, 0]


def test_an_hour_is_no_average_of_averages() -> None:
    """10 in one minute, 1, 1, 1 in the next: 13 / 4 = 3, and not (10 + 1) / 2 = 5."""
    rows = services("latency", [10]) + services("latency", [1, 1, 1])
    rows[0]["time"] = NOON + timedelta(minutes=1)
    formula = "from(Service.latency).longAvg()"
    assert sorted(map(str, values_of(formula, rows))) == ["1", "10"]
    assert value_of(formula, rows, grain="hour") == 3


def test_apdex() -> None:
    """At T satisfied, up to 4T tolerated; failed ones count, and so do those of no status."""
    figures = [(500, True), (501, True), (2000, True), (2001, True), (1, False), (1, None)]
    rows = [service(latency=latency, status=status) for latency, status in figures]
    # 1 satisfied, 2 tolerated of 6: (10000 + 20000 / 2) / 6 = 3333.3
    assert value_of("from(Service.latency).apdex(name, status)", rows) == 3333


def test_apdex_threshold_of_a_service() -> None:
    """T is the service's own where it has one: 100 is satisfied, 400 tolerated, 401 neither."""
    rows = [service(latency=latency, status=True) for latency in (100, 400, 401)]
    formula = "from(Service.latency).apdex(name, status)"
    # 1 satisfied, 1 tolerated of 3: (10000 + 5000) / 3
    assert value_of(formula, rows, thresholds={"a": 100, "b": 1}) == 5000


def test_percentile_roofs_round_half_up() -> None:
    """Six values: roofs 3, 4.5 → 5, 5.4 → 5, 5.7 → 6, 5.94 → 6."""
    rows = services("latency", [6, 1, 5, 2, 4, 3, None])
    assert value_of("from(Service.latency).percentile2(1)", rows) == {
        "{p=50}": 3,
        "{p=75}": 5,
        "{p=90}": 5,
        "{p=95}": 6,
        "{p=99}": 6,
    }


def test_log_percentiles_are_floors_of_a_64th_of_a_power_of_two() -> None:
    """Exact up to 127; 700,000 lies between 85 and 86 times 8,192; below 0 is 0."""
    for value, floor in ((-5, 0), (127, 127), (129, 128), (700_000, 85 * 8192)):
        result = value_of("from(Service.latency).percentileLog()", services("latency", [value]))
        assert result == dict.fromkeys(("{p=50}", "{p=75}", "{p=90}", "{p=95}", "{p=99}"), floor)


def test_a_row_without_microseconds_has_those_of_its_milliseconds() -> None:
    """So a metric over them counts every row."""
    rows = [service(latency=3), service(latency=0, latencyMicros=500)]
    assert value_of("from(Service.latencyMicros).longAvg()", rows) == 1750


def test_percentile_of_one_value() -> None:
    """The roof of 0.5 is 1, and so one value is every percentile; below the precision it is 0."""
    rows = services("latency", [9])
    old = value_of("from(Service.latency).percentile(10)", rows)
    assert old == {"0": 0, "1": 0, "2": 0, "3": 0, "4": 0}
    new = value_of("from(Service.latency).percentile2(2)", rows)
    assert isinstance(new, dict)
    assert set(new.values()) == {8}


def test_percentile_gives_floors() -> None:
    """Buckets 0, 1, 2, 3 of ten; roofs 2, 3, 3.6 → 4, 3.8 → 4, 3.96 → 4."""
    rows = services("latency", [30, 29, 14, 5])
    old = value_of("from(Service.latency).percentile(10)", rows)
    assert old == {"0": 10, "1": 20, "2": 30, "3": 30, "4": 30}


def test_percentile_of_negative_values_truncates() -> None:
    """-15 / 10 is -1, as in Java, and its floor reads -10."""
    value = value_of("from(Service.latency).percentile2(10)", services("latency", [-15]))
    assert isinstance(value, dict)
    assert set(value.values()) == {-10}


def test_histogram_has_its_empty_buckets_and_an_open_last_one() -> None:
    """Keys are lower edges; what is beyond falls into the last, what is below 0 into the first."""
    rows = services("latency", [0, 99, 100, 350, 10**6, -5, None])
    value = value_of("from(Service.latency).histogram(100, 3)", rows)
    assert value == {"0": 3, "100": 1, "200": 0, "300": 2}


def test_label_count() -> None:
    """Each label with its count; a row without the label is none."""
    rows = services("httpResponseStatusCode", [200, 404, 200, None])
    value = value_of("from(Service.*).labelCount(httpResponseStatusCode)", rows)
    assert value == {"{n=200}": 2, "{n=404}": 1}


def test_label_count_keeps_the_most_frequent() -> None:
    """Beyond the cap the highest counts stay, and of equal ones the smaller name."""
    rows = services("tlsMode", ["c", "b", "a", "b"])
    assert value_of("from(Service.*).labelCount(tlsMode, 2)", rows) == {"{n=b}": 2, "{n=a}": 1}


def test_label_avg() -> None:
    """1 where 0 < sum < count; otherwise the quotient, toward zero."""
    figures: dict[str, list[int | None]] = {
        "a": [0, 1, 0],
        "b": [5, 2],
        "c": [0, 0],
        "d": [-7, 0],
        "e": [None],
    }
    rows = [
        service(tlsMode=label, latency=value) for label in figures for value in figures[label]
    ] + [service(latency=100)]
    value = value_of("from(Service.*).labelAvg(tlsMode, latency)", rows)
    assert value == {"{n=a}": 1, "{n=b}": 3, "{n=c}": 0, "{n=d}": -3}


def test_label_avg_is_capped_at_50() -> None:
    """Of 51 labels with one row each, but the last with two, the last but one goes."""
    labels = [f"l{number:02}" for number in range(51)] + ["l50"]
    rows = [service(tlsMode=label, latency=7) for label in labels]
    value = value_of("from(Service.*).labelAvg(tlsMode, latency)", rows)
    assert isinstance(value, dict)
    assert set(value) == {f"{{n={label}}}" for label in labels} - {"{n=l49}"}


@pytest.mark.parametrize(
    "formula",
    [
        "from(Service.latency).longAvg()",
        "from(Service.latency).percentile2(1)",
        "from(Service.latency).histogram(1, 2)",
        "from(Service.*).labelCount(tlsMode)",
        "from(Service.*).labelAvg(tlsMode, latency)",
        "from(Service.*).filter(latency == 1).cpm()",
    ],
)
def test_nothing_measured_is_no_value(formula: str) -> None:
    """Where no row passes, or none has the value, there is no value and not 0."""
    assert values_of(formula, [service(latency=None)]) == []


def test_filters_are_anded() -> None:
    """Every filter of a chain must hold."""
    rows = [service(latency=latency) for latency in (1, 5, 9)]
    assert value_of("from(Service.*).filter(latency > 1).filter(latency < 9).count()", rows) == 1


def test_a_cast_in_from() -> None:
    """Texts are measured as the numbers that they are, others not at all."""
    rows = services("tag", [{"t": "7"}, {"t": "x"}, {"t": "-2"}, {}, None])
    assert value_of('from((str->long)Service.tag["t"]).longAvg()', rows) == 2
