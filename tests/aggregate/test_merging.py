"""Merging: any order, any grouping and any split of the rows give the same states."""

from __future__ import annotations

import functools
import random
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")

import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st

from batchmill.aggregate import Deltas, from_arrow, to_arrow
from batchmill.oal import double_limbs
from batchmill.sources import Grain
from batchmill.store import open_store
from tests.aggregate.kit import Content, Kernel, States, content
from tests.kit.pipelines import (
    EVERY_FUNCTION,
    EVERY_SOURCE,
    START,
    contents,
    every_events,
    sqlite,
)
from tests.kit.stores import bucket_of
from tests.oracle.catalog import Row

LONGS = st.integers(-(2**63), 2**63 - 1) | st.sampled_from((2**63 - 1, -(2**63), -1, 0))
DOUBLES = st.floats(-(2.0**62), 2.0**62, exclude_min=True, exclude_max=True) | st.floats(-1, 1)
LABELS = st.text(max_size=3) | st.sampled_from(("", '"', "\\", ",", ":", "\0", "é", "é", "💳"))
EXTREMES = """
total = from(Endpoint.sideCar.internalRequestLatencyNanos).sum();
most = from(Endpoint.sideCar.internalRequestLatencyNanos).max();
least = from(Endpoint.sideCar.internalRequestLatencyNanos).min();
buckets = from(Endpoint.sideCar.internalRequestLatencyNanos).percentile2(1);
wide = from(Endpoint.sideCar.internalRequestLatencyNanos).percentile2(1000000007);
steps = from(Endpoint.sideCar.internalRequestLatencyNanos).histogram(3, 7);
counts = from(Endpoint.*).labelCount(rpcStatusCode);
sums = from(Endpoint.*).labelAvg(rpcStatusCode, sideCar.internalRequestLatencyNanos);
text = from((str->long)Endpoint.tag["n"]).sum();
"""
DOUBLE = """
total = from(ServiceInstanceJVMCPU.usePercent).sumDouble();
most = from(ServiceInstanceJVMCPU.usePercent).maxDouble();
least = from(ServiceInstanceJVMCPU.usePercent).minDouble();
"""


kernel_of = functools.cache(Kernel)


def split(events: dict[str, list[Row]], pieces: int, seed: int) -> list[dict[str, list[Row]]]:
    """The rows of each source in any order, cut into pieces, of which some may be empty."""
    rng = random.Random(seed)
    parts: list[dict[str, list[Row]]] = [{} for _ in range(pieces)]
    for source, rows in events.items():
        shuffled = rng.sample(rows, len(rows))
        cuts = sorted(rng.choices(range(len(rows) + 1), k=pieces - 1))
        for part, start, end in zip(parts, [0, *cuts], [*cuts, len(rows)], strict=True):
            part[source] = shuffled[start:end]
    return parts


def content_of(deltas: dict[str, Deltas]) -> dict[str, Content]:
    """What the deltas of each source hold."""
    return {source: content(part) for source, part in deltas.items()}


@pytest.fixture(scope="module")
def events() -> dict[str, list[Row]]:
    """Rows of nine sources in four days, a third of them late by up to that."""
    return every_events(11, EVERY_SOURCE, 40, days=4, late_share=0.3)


@pytest.fixture(scope="module")
def kernel() -> Kernel:
    """Every function and filter."""
    return Kernel(EVERY_FUNCTION)


@pytest.fixture(scope="module")
def whole(kernel: Kernel, events: dict[str, list[Row]]) -> tuple[dict[str, Content], States]:
    """Content and states of all rows in one batch."""
    deltas = kernel.make(events)
    return content_of(deltas), kernel.states(deltas)


@settings(max_examples=4)
@given(pieces=st.integers(2, 6), seed=st.integers(0, 2**32 - 1))
def test_any_split_gives_the_same_deltas(
    kernel: Kernel,
    events: dict[str, list[Row]],
    whole: tuple[dict[str, Content], States],
    pieces: int,
    seed: int,
) -> None:
    """Every function: states do not depend on how rows were cut and shuffled."""
    merged = kernel.merge(*map(kernel.make, split(events, pieces, seed)))
    assert content_of(merged) == whole[0]
    assert kernel.states(merged) == whole[1]


@settings(max_examples=3)
@given(seed=st.integers(0, 2**32 - 1))
def test_merging_is_associative_and_commutative(
    kernel: Kernel, events: dict[str, list[Row]], seed: int
) -> None:
    """Whichever two are merged first, and in whatever order."""
    a, b, c = map(kernel.make, split(events, 3, seed))
    once = content_of(kernel.merge(a, b, c))
    assert content_of(kernel.merge(kernel.merge(a, b), c)) == once
    assert content_of(kernel.merge(a, kernel.merge(b, c))) == once
    assert content_of(kernel.merge(c, kernel.merge(b, a))) == once
    assert kernel.states(kernel.merge(c, a, b)) == kernel.states(kernel.merge(a, b, c))


def test_merging_does_not_change_what_is_merged(
    kernel: Kernel, events: dict[str, list[Row]]
) -> None:
    """Deltas can be merged again, with others."""
    a, b = map(kernel.make, split(events, 2, 1))
    before = content_of(a), content_of(b)
    kernel.merge(a, b)
    kernel.merge(a, a)
    assert (content_of(a), content_of(b)) == before


@settings(max_examples=2)
@given(pieces=st.integers(2, 5), seed=st.integers(0, 2**32 - 1))
@pytest.mark.system
def test_any_split_makes_the_same_store(
    kernel: Kernel, events: dict[str, list[Row]], pieces: int, seed: int
) -> None:
    """Committed at once, or a batch for each piece: states and values are the same."""
    parts = [kernel.make(part) for part in split(events, pieces, seed)]
    with tempfile.TemporaryDirectory() as folder:
        stores = []
        for name, batches in (("once", [kernel.merge(*parts)]), ("pieces", parts)):
            (Path(folder) / name).mkdir()
            with open_store(sqlite(Path(folder) / name), ttl_days=365) as store:
                kernel.commit(store, *batches)
                stores.append(contents(store))
    assert stores[0] == stores[1]


@settings(max_examples=4)
@given(pieces=st.integers(1, 3), seed=st.integers(0, 2**32 - 1))
def test_deltas_travel_as_arrow_tables(
    kernel: Kernel, events: dict[str, list[Row]], pieces: int, seed: int
) -> None:
    """Through a Parquet file, in slices and row groups of any size; then they merge as before."""
    rng = random.Random(seed)
    parts = [kernel.make(part) for part in split(events, pieces, seed)]
    for source, aggregator in kernel.aggregators.items():
        plan = aggregator.plan
        read = []
        with tempfile.TemporaryDirectory() as folder:
            for part in parts:
                table = to_arrow(part[source], plan)
                cut = rng.randint(0, len(table))
                path = Path(folder) / "deltas.parquet"
                pq.write_table(table, path, row_group_size=rng.randint(1, 20))
                assert content(from_arrow(table, plan)) == content(part[source])
                read.append(from_arrow(table.slice(0, cut), plan))
                read.append(from_arrow(pq.read_table(path).slice(cut), plan))
        whole = aggregator.merge([part[source] for part in parts])
        assert content(aggregator.merge(read)) == content(whole)


@settings(max_examples=4)
@given(seed=st.integers(0, 2**32 - 1))
def test_rolling_up_is_the_same_at_once_and_in_steps(
    kernel: Kernel, events: dict[str, list[Row]], seed: int
) -> None:
    """Minutes to hours to days, minutes to days, and rows that all start at their day's start."""
    parts = [kernel.make(part) for part in split(events, 3, seed)]
    minutes = kernel.merge(*parts)
    at_midnight = kernel.make(
        {
            source: [
                {**row, "time": row["time"].replace(hour=0, minute=0, second=0, microsecond=0)}
                for row in rows
            ]
            for source, rows in events.items()
        }
    )
    for source, aggregator in kernel.aggregators.items():
        hours = aggregator.roll_up(minutes[source], Grain.HOUR)
        days = content(aggregator.roll_up(minutes[source], Grain.DAY))
        assert content(aggregator.roll_up(hours, Grain.DAY)) == days
        day_parts = [aggregator.roll_up(part[source], Grain.DAY) for part in parts]
        assert content(aggregator.merge(day_parts)) == days
        assert content(at_midnight[source]) == days


@settings(max_examples=60)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 2), st.none() | LONGS, st.none() | LABELS), min_size=1, max_size=12
    ),
    cut=st.integers(0, 12),
)
def test_whole_numbers_are_exact(
    rows: Sequence[tuple[int, int | None, str | None]], cut: int
) -> None:
    """Sums beyond 64 bits, extremes, buckets of numbers of any size, labels of any text."""
    kernel = kernel_of(EXTREMES)
    made = [
        {
            "time": START + timedelta(minutes=minute),
            "name": "e",
            "latency": 1,
            "status": True,
            "sideCar": None if number is None else {"internalRequestLatencyNanos": number},
            "tag": None if number is None else {"n": f"{number:+d}"},
            "rpcStatusCode": label,
        }
        for minute, number, label in rows
    ]
    merged = kernel.merge(
        kernel.make({"Endpoint": made[:cut]}), kernel.make({"Endpoint": made[cut:]})
    )
    states = kernel.states(merged)
    for (name, grain, bucket, _), state in states.items():
        inside = [
            (number, label)
            for minute, number, label in rows
            if bucket_of(grain, 202603011000 + minute) == bucket
        ]
        assert state[0] == plain_state(name, inside), name


def plain_state(name: str, rows: Sequence[tuple[int | None, str | None]]) -> object:
    """A state of :data:`EXTREMES` over rows, computed the plain way."""
    numbers = [number for number, _ in rows if number is not None]
    labels = [label for _, label in rows if label is not None]
    both = [(label, number) for number, label in rows if number is not None and label is not None]
    match name:
        case "total" | "text":
            return sum(numbers) if numbers else None
        case "most":
            return max(numbers, default=None)
        case "least":
            return min(numbers, default=None)
        case "counts":
            return {label: labels.count(label) for label in labels} or None
        case "sums":
            return {
                label: (
                    sum(number for other, number in both if other == label),
                    sum(other == label for other, _ in both),
                )
                for label, _ in both
            } or None
    width = {"buckets": 1, "wide": 1_000_000_007, "steps": 3}[name]
    keys = [abs(number) // width * (-1 if number < 0 else 1) for number in numbers]
    if name == "steps":
        keys = [max(0, min(key, 7)) for key in keys]
    return {key: keys.count(key) for key in keys} or None


@settings(max_examples=60)
@given(numbers=st.lists(st.none() | DOUBLES, min_size=1, max_size=12), cut=st.integers(0, 12))
def test_doubles_are_as_exact_as_in_the_store(numbers: Sequence[float | None], cut: int) -> None:
    """The sum of the limbs of each number, tiny, negative and large; extremes as they came."""
    kernel = kernel_of(DOUBLE)
    rows: list[Row] = [
        {"time": START, "id": "i", "name": "i", "serviceName": "s", "usePercent": number}
        for number in numbers
    ]
    source = "ServiceInstanceJVMCPU"
    merged = kernel.merge(kernel.make({source: rows[:cut]}), kernel.make({source: rows[cut:]}))
    present = [number for number in numbers if number is not None]
    limbs = [sum(limb) for limb in zip(*map(double_limbs, present), strict=True)]
    wanted = {
        "total": tuple(limbs) or None,
        "most": max(present, default=None),
        "least": min(present, default=None),
    }
    states = {key[0]: state[0] for key, state in kernel.states(merged).items()}
    assert states == wanted
