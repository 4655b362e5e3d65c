"""States and values: sharing, merging in any order, and results against a plain oracle."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchmill import oal
from batchmill.oal import (
    ApdexCount,
    Bucketed,
    Clamped,
    Condition,
    Count,
    DoubleSum,
    Extreme,
    Label,
    LabelSum,
    LogBucketed,
    MapKey,
    Metric,
    Path,
    State,
    Sum,
    Tally,
)
from batchmill.oal.values import log_floor

Row: TypeAlias = dict[str, Any]

THRESHOLD = 500


def metric(text: str) -> Metric:
    """The metric that a definition without a name makes."""
    return oal.parse(f"m = {text};").metrics[0]


# A plain reading of the states, row by row.


def look_up(path: Path, row: Row) -> Any:
    """The value at a path, None wherever the way breaks off."""
    value: Any = row
    for part in path.parts:
        value = (value or {}).get(part.key if isinstance(part, MapKey) else part)
    if path.cast and value is not None:
        number = int(value) if value.lstrip("-").isdigit() else None
        return number if number is not None and -(2**63) <= number < 2**63 else None
    return value


def holds(condition: Condition, row: Row) -> bool:
    """Whether a row meets a condition."""
    value, literal = look_up(condition.path, row), condition.literal
    if literal is None:
        return (value is None) is (condition.op == "==")
    if value is None:
        return False
    compare: dict[str, Callable[[Any, Any], bool]] = {
        "==": lambda a, b: a == b,
        "!=": lambda a, b: a != b,
        ">": lambda a, b: a > b,
        "in": lambda a, b: a in b,
        "contain": lambda a, b: b in a,
        "not contain": lambda a, b: b not in a,
    }
    return compare[condition.op](value, literal)


def reduce(state: State, rows: Sequence[Row]) -> Any:
    """What a state holds after these rows."""
    kept = [row for row in rows if all(holds(condition, row) for condition in state.where)]
    if isinstance(state, Count):
        return len(kept)
    if isinstance(state, ApdexCount):
        good = (look_up(state.value, row) for row in kept if look_up(state.status, row))
        return sum(state.of(value, THRESHOLD) for value in good if value is not None)
    if isinstance(state, LabelSum):
        sums: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
        for row in kept:
            label, value = look_up(state.label, row), look_up(state.value, row)
            if label is not None and value is not None:
                sums[label] = (sums[label][0] + value, sums[label][1] + 1)
        return dict(sums)
    target = state.key.value if isinstance(state, Tally) else state.value
    values = [value for row in kept if (value := look_up(target, row)) is not None]
    if isinstance(state, Tally):
        key = state.key
        return dict(Counter(values if isinstance(key, Label) else map(key.of, values)))
    if not values:
        return None
    if isinstance(state, Sum):
        return sum(values)
    if isinstance(state, DoubleSum):
        return tuple(map(sum, zip(*map(oal.double_limbs, values), strict=True)))
    return max(values) if state.which == "max" else min(values)


def merge(state: State, one: Any, other: Any) -> Any:
    """What a state holds after the rows of both parts."""
    if isinstance(state, Extreme) and None not in (one, other):
        return max(one, other) if state.which == "max" else min(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        keys = one.keys() | other.keys()
        return {key: add(one.get(key), other.get(key)) for key in keys}
    return add(one, other)


def add(one: Any, other: Any) -> Any:
    """The sum of two numbers, or of two tuples of them; None is nothing."""
    if one is None or other is None:
        return other if one is None else one
    if isinstance(one, tuple):
        return tuple(a + b for a, b in zip(one, other, strict=True))
    return one + other


def value_of(text: str, rows: Sequence[Row], minutes: int = 1) -> Any:
    """The final value of a definition over rows."""
    definition = metric(text)
    return definition.values([reduce(state, rows) for state in definition.states], minutes)


def latencies(*values: int | None) -> list[Row]:
    """Rows of that latency, all of them successful."""
    return [{"latency": value, "status": True, "name": "s"} for value in values]


# Which states a metric needs


def test_metrics_of_one_source_share_their_count() -> None:
    """Since latency is never null, counting latencies is counting rows."""
    texts = (
        "from(Service.*).cpm()",
        "from(Service.latency).longAvg()",
        "from(Service.*).percent(status == true)",
        "from(Service.latency).apdex(name, status)",
        "from(Service.latency).count()",
    )
    assert {metric(text).states[-1] for text in texts} == {Count(())}


def test_a_null_is_no_measurement() -> None:
    """Where a measured field may be null, only the rows that have it are counted."""
    definition = metric("from(ServiceInstanceJVMMemory.used).filter(heapStatus == true).longAvg()")
    assert [condition.text for condition in definition.states[1].where] == [
        "heapStatus==true",
        "used!=null",
    ]
    assert [condition.text for condition in definition.states[0].where] == ["heapStatus==true"]


@pytest.mark.parametrize("call", ["cpm()", "count()", "percent(status == true)"])
def test_what_measures_nothing_counts_every_row(call: str) -> None:
    """The field in from() does not matter to counts and shares, null or not."""
    definition = metric(f"from(Service.httpResponseStatusCode).{call}")
    assert definition.states == metric(f"from(Service.*).{call}").states


def test_a_filter_on_the_measured_value_says_it_is_there() -> None:
    """A comparison is false on null already, so that one condition more would say nothing."""
    code = "httpResponseStatusCode"
    definition = metric(f"from(Service.{code}).filter({code} > 1).longAvg()")
    assert [condition.text for condition in definition.states[1].where] == [f"{code}>1"]
    definition = metric(f"from(Service.{code}).filter({code} == null).longAvg()")
    assert len(definition.states[1].where) == 2


def test_percentiles_share_their_tally() -> None:
    """The old form and the new one count the same buckets; another precision does not."""
    old, new = (
        metric(f"from(Service.latency).{name}(10)") for name in ("percentile", "percentile2")
    )
    assert old.states == new.states
    assert metric("from(Service.latency).percentile2(1)").states != new.states


def test_doubles_are_summed_exactly_whole_numbers_plainly() -> None:
    """sum() and doubleAvg() take the state that fits the field."""
    assert isinstance(metric("from(EnvoyInstanceMetric.value).sum()").states[0], DoubleSum)
    assert isinstance(metric("from(Service.latency).doubleAvg()").states[0], Sum)


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("from(Service.latency).max()", (Extreme,)),
        ("from(Service.*).rate(status == true, status == false)", (Count, Count, Count)),
        ("from(Service.latency).apdex(name, status)", (ApdexCount, ApdexCount, Count)),
        ("from(Service.latency).histogram(10, 3)", (Tally,)),
        ("from(Service.*).labelCount(name)", (Tally,)),
        ("from(Service.*).labelAvg(name, latency)", (LabelSum,)),
    ],
)
def test_the_states_of_each_function(text: str, kinds: tuple[type, ...]) -> None:
    """In the order that values() takes them."""
    assert tuple(map(type, metric(text).states)) == kinds


def test_filters_and_a_functions_own_condition_are_one() -> None:
    """percent(x) over filter(x) asks for one count, twice."""
    definition = metric("from(Service.*).filter(status == true).percent(status == true)")
    assert len(set(definition.states)) == 1


# Merging

FUNCTIONS = (
    "from(Service.*).count()",
    "from(Service.httpResponseStatusCode).cpm()",
    "from(Service.latency).sum()",
    "from(Service.latency).longAvg()",
    "from(Service.httpResponseStatusCode).doubleAvg()",
    "from(Service.latency).max()",
    "from(Service.latency).min()",
    'from((str->long)Service.tag["n"]).longAvg()',
    "from(Service.*).percent(status == true)",
    "from(Service.*).filter(latency > 5).rate(status == true, httpResponseStatusCode > 400)",
    "from(Service.latency).apdex(name, status)",
    "from(Service.latency).percentile2(10)",
    "from(Service.latency).percentile(1)",
    "from(Service.latency).histogram(100, 5)",
    "from(Service.*).labelCount(name, 2)",
    "from(Service.*).labelAvg(name, httpResponseStatusCode)",
    'from(Service.*).filter(tags contain "a").count()',
    'from(Service.*).filter(tags not contain "a").filter(name in ["x", "y"]).count()',
)
row_of_service = st.fixed_dictionaries(
    {
        "latency": st.integers(0, 3000) | st.sampled_from([500, 501, 2000, 2001]),
        "status": st.booleans() | st.none(),
        "httpResponseStatusCode": st.none() | st.integers(200, 599),
        "name": st.none() | st.sampled_from(["x", "y", "z"]),
        "tag": st.none() | st.fixed_dictionaries({"n": st.sampled_from(["5", "-7", "seven"])}),
        "tags": st.none() | st.lists(st.sampled_from(["a", "b"])),
    }
)


DEFINITIONS = tuple(map(metric, FUNCTIONS))


@given(
    st.lists(st.tuples(row_of_service, st.integers(0, 3)), max_size=12),
    st.permutations(range(4)),
)
def test_any_split_and_any_order_give_the_same(
    dealt: list[tuple[Row, int]], order: list[int]
) -> None:
    """Rows in one piece, or in parts merged in any order, nothing among them: same states.

    With every function.
    """
    parts = [[row for row, pile in dealt if pile == part] for part in order]
    for definition in DEFINITIONS:
        whole = [reduce(state, [row for row, _ in dealt]) for state in definition.states]
        merged: list[Any] = [None] * len(definition.states)
        for rows in parts:
            for index, state in enumerate(definition.states):
                merged[index] = merge(state, reduce(state, rows), merged[index])
        assert merged == whole, definition.text
        assert definition.values(merged, 60) == definition.values(whole, 60), definition.text


eighths = st.integers(-(2**60), 2**60).map(lambda n: n / 8)
fractions = st.integers(-(2**53), 2**53).map(lambda n: n * 2.0**-80)


@given(st.lists(eighths | fractions, min_size=1), st.randoms())
def test_sums_of_doubles_are_exact(values: list[float], random: Any) -> None:
    """However they are added up, the sum is the one that is rounded once."""
    definition = metric("from(EnvoyInstanceMetric.value).sumDouble()")
    merged = None
    for value in random.sample(values, len(values)):
        merged = add(merged, oal.double_limbs(value))
    assert definition.values([merged], 1) == math.fsum(values)
    assert definition.values([sum(map(Fraction, values))], 1) == math.fsum(values)


def test_a_sum_beyond_every_float_is_infinite() -> None:
    """It does not raise in the middle of a query."""
    assert oal.exact_double((2**1030, 0, 0, 0)) == math.inf
    assert oal.exact_double((-(2**1030), 0, 0, 0)) == -math.inf


# Values


@pytest.mark.parametrize("text", FUNCTIONS)
def test_without_rows_there_is_no_value(text: str) -> None:
    """None, not 0: nothing was measured."""
    definition = metric(text)
    assert definition.values([reduce(state, []) for state in definition.states], 1) is None
    assert definition.values([None for _ in definition.states], 1) is None


@given(st.lists(st.integers(-(2**40), 2**40), min_size=1))
def test_averages_truncate_toward_zero(values: list[int]) -> None:
    """As Java divides: -7 / 2 is -3."""
    rows = [{"used": value} for value in values]
    expected = int(Fraction(sum(values), len(values)))
    assert value_of("from(ServiceInstanceJVMMemory.used).longAvg()", rows) == expected
    average = value_of("from(ServiceInstanceJVMMemory.used).doubleAvg()", rows)
    assert average == float(Fraction(sum(values), len(values)))


@pytest.mark.parametrize(("minutes", "expected"), [(1, 119), (60, 1), (1440, 0)])
def test_calls_per_minute(minutes: int, expected: int) -> None:
    """The count by the minutes of the bucket, rounded down."""
    assert metric("from(Service.*).cpm()").values([119], minutes) == expected


def test_max_never_falls_below_zero_min_does() -> None:
    """Both of whole numbers and of doubles."""
    rows = [{"used": -5, "value": -2.5}]
    assert value_of("from(ServiceInstanceJVMMemory.used).max()", rows) == 0
    assert value_of("from(ServiceInstanceJVMMemory.used).min()", rows) == -5
    assert value_of("from(EnvoyInstanceMetric.value).maxDouble()", rows) == 0.0
    assert value_of("from(EnvoyInstanceMetric.value).minDouble()", rows) == -2.5


def test_shares_are_out_of_ten_thousand() -> None:
    """percent of all rows; rate of one count by another, 0 where there is none to divide by."""
    rows = [{"status": True}, {"status": True}, {"status": False}]
    assert value_of("from(Service.*).percent(status == true)", rows) == 6666
    assert value_of("from(Service.*).rate(status == true, status == false)", rows) == 20000
    assert value_of("from(Service.*).rate(status == true, name != null)", rows) == 0


def test_apdex() -> None:
    """Up to T satisfied, up to 4T half so, failures and the rest not at all."""
    text = "from(Service.latency).apdex(name, status)"
    failed = [{"latency": 1, "status": False, "name": "s"}]
    assert value_of(text, latencies(500, 501, 2000, 2001) + failed) == (10000 + 10000) // 5
    assert value_of(text, latencies(501, 2001, 2001)) == 5000 // 3


def ranked(values: list[int], precision: int) -> list[int]:
    """Percentiles read off the sorted list of buckets."""
    buckets = sorted(value // precision for value in values)
    roofs = [
        math.floor(Fraction(len(values) * rank, 100) + Fraction(1, 2))
        for rank in (50, 75, 90, 95, 99)
    ]
    return [buckets[max(0, roof - 1)] * precision for roof in roofs]


@given(st.lists(st.integers(0, 500), min_size=1, max_size=300), st.sampled_from([1, 10, 7]))
def test_percentiles_are_exact_to_the_bucket(values: list[int], precision: int) -> None:
    """The floor of the bucket in which the rank's row lies."""
    percentiles = value_of(f"from(Service.latency).percentile2({precision})", latencies(*values))
    assert list(percentiles.values()) == ranked(values, precision)
    assert list(percentiles) == ["{p=50}", "{p=75}", "{p=90}", "{p=95}", "{p=99}"]
    old = value_of(f"from(Service.latency).percentile({precision})", latencies(*values))
    assert old == dict(zip("01234", percentiles.values(), strict=True))


def test_small_latencies_are_seen_with_a_precision_of_one() -> None:
    """percentile2(1) does not read 0 below 10 ms."""
    assert value_of("from(Service.latency).percentile2(1)", latencies(3, 4, 9))["{p=50}"] == 4


def test_a_histogram_has_all_its_buckets() -> None:
    """Named by their lower edges, empty ones too; the last one is open."""
    histogram = value_of(
        "from(Service.latency).histogram(100, 3)", latencies(0, 99, 100, 300, 9999)
    )
    assert histogram == {"0": 2, "100": 1, "200": 0, "300": 2}


def test_labels_kept_are_the_most_frequent() -> None:
    """Beyond the cap the highest counts stay, ties by name."""
    rows = [{"name": name} for name in "ccbbaad"]
    assert value_of("from(Service.*).labelCount(name, 2)", rows) == {"{n=a}": 2, "{n=b}": 2}
    many = [{"name": f"{number:03}"} for number in range(60)]
    counts = value_of("from(Service.*).labelCount(name)", many)
    assert list(counts) == [f"{{n={number:03}}}" for number in range(50)]


def test_averages_by_label() -> None:
    """Sum by count, but 1 where it would vanish between 0 and 1; at most 50 labels."""
    rows = [{"name": "a", "latency": value} for value in (1, 0, 0)]
    rows += [{"name": "b", "latency": value} for value in (0, 0)]
    rows += [{"name": "c", "latency": value} for value in (5, 10, 7)]
    averages = value_of("from(Service.*).labelAvg(name, latency)", rows)
    assert averages == {"{n=a}": 1, "{n=b}": 0, "{n=c}": 7}
    many = [{"name": f"{number:03}", "latency": 3} for number in range(60)]
    assert len(value_of("from(Service.*).labelAvg(name, latency)", [*many, many[-1]])) == 50


def test_bucket_numbers() -> None:
    """Toward zero; of a histogram, from 0 up to its last."""
    path = metric("from(Service.latency).sum()").value
    assert path is not None
    assert [Bucketed(path, 10).of(value) for value in (-11, -9, 9, 10)] == [-1, 0, 0, 1]
    assert [Clamped(path, 10, 2).of(value) for value in (-11, 9, 10, 29, 999)] == [0, 0, 1, 2, 2]


@given(st.integers(-5, 2**63 - 1))
def test_log_buckets_grow_with_the_value(value: int) -> None:
    """In order; a bucket's floor is in it, and less than 2 % below any of its values."""
    path = metric("from(Service.latency).sum()").value
    assert path is not None
    bucket = LogBucketed(path).of(value)
    floor = log_floor(bucket)
    assert LogBucketed(path).of(floor) == bucket
    assert 0 <= max(0, value) - floor <= floor // 64
    assert LogBucketed(path).of(value + 1) in (bucket, bucket + 1)
