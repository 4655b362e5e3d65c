"""What a store gets: tallies as texts, entities with names and layers, rows by minute."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from batchmill.aggregate import Aggregator, EntityBook, contribution
from batchmill.aggregate.cells import texts
from batchmill.aggregate.columns import Tallies
from batchmill.oal import load
from batchmill.sources import Grain, builtin_catalog, minute_bucket
from batchmill.store import (
    MAX_LABELS,
    Layout,
    decode_label_sums,
    decode_labels,
    encode_numbers,
)
from tests.kit.pipelines import START
from tests.oracle.catalog import Row
from tests.oracle.generate import to_table

LONG = st.integers(-(2**63), 2**63 - 1) | st.integers(-30, 30)
GROUPS = st.lists(st.lists(LONG, max_size=6), min_size=1, max_size=6)


def counted(groups: Sequence[Sequence[Any]], keys: Any, amounts: Any = None) -> list[str | None]:
    """The text of each group's keys; ``keys`` and ``amounts`` are those of all groups."""
    codes = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    amounts = amounts or (np.ones(len(codes), np.int64),)
    made: list[str | None] = texts(Tallies.summed(codes, len(groups), keys, amounts)).to_pylist()
    return made


@given(groups=GROUPS)
def test_numbers_are_written_as_the_store_writes_them(groups: list[list[int]]) -> None:
    """In order, each once, a count of 1 left out; nothing for a group without keys."""
    keys = np.array([key for group in groups for key in group], np.int64)
    assert counted(groups, keys) == [encode_numbers(Counter(group)) for group in groups]


@given(groups=st.lists(st.lists(st.text(max_size=3), max_size=6), min_size=1, max_size=6))
def test_labels_are_read_back_as_they_were(groups: list[list[str]]) -> None:
    """Quotes, commas and characters of any alphabet; each label once."""
    keys = pa.array([key for group in groups for key in group], pa.string())
    for text, group in zip(counted(groups, keys), groups, strict=True):
        assert (decode_labels(text) if text else {}) == Counter(group)
        pairs = json.JSONDecoder(object_pairs_hook=list).decode(f"{{{text or ''}}}")
        assert len(pairs) == len(set(group))


@given(pairs=st.lists(st.tuples(st.sampled_from("abc"), LONG), max_size=8))
def test_sums_by_label_outgrow_64_bits(pairs: list[tuple[str, int]]) -> None:
    """Sum and count of each label, exact."""
    keys = pa.array([label for label, _ in pairs], pa.string())
    upper = np.array([number >> 32 for _, number in pairs], np.int64)
    lower = np.array([number & 0xFFFFFFFF for _, number in pairs], np.int64)
    (text,) = counted([pairs], keys, (upper, lower, np.ones(len(pairs), np.int64)))
    wanted = {
        label: (
            sum(number for other, number in pairs if other == label),
            sum(other == label for other, _ in pairs),
        )
        for label, _ in pairs
    }
    assert (decode_label_sums(text) if text else {}) == wanted


@given(
    groups=st.lists(st.lists(st.sampled_from("abcdefg"), max_size=20), min_size=1, max_size=4),
    most=st.integers(1, 5),
)
def test_labels_that_are_too_many_become_one(groups: list[list[str]], most: int) -> None:
    """The most frequent stay, ties by name; each group by itself, and the rest counts as ``g``."""
    keys = pa.array([key for group in groups for key in group], pa.string())
    codes = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    ones = np.ones(len(codes), np.int64)
    limited, moved = Tallies.summed(codes, len(groups), keys, (ones,)).limited(most, "g")
    wanted, rest = [], 0
    for group in groups:
        counts = Counter(group)
        labels = sorted(set(group) - {"g"}, key=lambda label: (-counts[label], label))
        for label in labels[most:]:
            rest += counts[label]
            counts["g"] += counts.pop(label)
        wanted.append(counts)
    assert [decode_labels(text) if text else {} for text in texts(limited).to_pylist()] == wanted
    assert moved == rest


def contribute(rows: Sequence[Row], oal: str, book: EntityBook, source: str = "Endpoint") -> Any:
    """What rows contribute, the columns of the store named like their metrics."""
    aggregator = Aggregator(builtin_catalog().source(source), load(oal))
    layout = Layout({metric.name: (metric.name,) for metric in aggregator.plan.metrics})
    return contribution(aggregator.make(to_table(source, rows)).deltas, aggregator, layout, book)


def lists(deltas: Any) -> dict[str, list[Any]]:
    """The columns of states as lists."""
    return {name: column.to_pylist() for name, column in deltas.cells.items()}


def row(**fields: Any) -> Row:
    """A row of Endpoint."""
    return {
        "time": START,
        "name": "e",
        "serviceName": "s",
        "serviceLayer": "GENERAL",
        "latency": 1,
        **fields,
    }


def test_a_batch_brings_no_more_labels_than_a_cell_may_have() -> None:
    """In every grain, and what is too many is counted."""
    rows = [row(latency=n) for n in range(MAX_LABELS + 5)]
    made = contribute(rows, "m = from(Endpoint.*).labelCount(latency);", EntityBook())
    for part in made.deltas:
        ((text,),) = (column.to_pylist() for column in part.cells.values())
        labels = decode_labels(text)
        assert (len(labels), labels["overflow"]) == (MAX_LABELS + 1, 5)
    assert made.moved_labels == 5 * len(Grain)


def test_combinations_of_roles_with_one_id_are_one_entity() -> None:
    """Names that are equal up to the limit, and layers of one kind: merged, with all layers."""
    book = EntityBook()
    rows = [
        row(name="x" * 150 + end, serviceLayer=layer)
        for end in ("a", "b")
        for layer in ("GENERAL", "MESH")
    ]
    made = contribute(rows, "m = from(Endpoint.*).count();", book)
    contents = [(part.grain, part.entities.to_pylist(), lists(part)) for part in made.deltas]
    assert contents == [(grain, [0], {"m": [4]}) for grain in Grain]
    (entity,) = book.rows()
    assert entity.name == "x" * 150
    assert entity.layers == {"GENERAL", "MESH"}
    assert entity.roles == {"service": "s", "name": "x" * 150}


def test_a_remembered_entity_has_the_layers_of_this_batch_only() -> None:
    """What one batch has merged is not there in the next one."""
    for layers in (("GENERAL", "MESH"), ("GENERAL",), ("MESH",)):
        book = EntityBook()
        rows = [row(serviceLayer=layer) for layer in layers]
        contribute(rows, "m = from(Endpoint.*).count();", book)
        assert [entity.layers for entity in book.rows()] == [set(layers)]


def test_rows_are_counted_by_minute() -> None:
    """How many rows each minute got, whatever their entities; hours and days are not counted."""
    rows = [row(time=START + timedelta(minutes=n // 3), name=str(n % 2)) for n in range(7)]
    made = contribute(rows, "m = from(Endpoint.*).count();", EntityBook())
    minutes = [minute_bucket(START + timedelta(minutes=n)) for n in range(3)]
    assert made.rows == 7
    assert made.rows_by_minute == dict(zip(minutes, (3, 3, 1), strict=True))


def test_one_book_numbers_the_entities_of_several_sources() -> None:
    """A service that has rows of two event types is one entity; numbers go on."""
    book = EntityBook()
    service: Row = {"time": START, "name": "s", "layer": "GENERAL", "latency": 1}
    relation: Row = {
        "time": START,
        "sourceServiceName": "s",
        "destServiceName": "t",
        "latency": 1,
    }
    one = contribute([service], "m = from(Service.*).count();", book, "Service")
    other = contribute([relation], "n = from(ServiceRelation.*).count();", book, "ServiceRelation")
    again = contribute([service], "m = from(Service.*).count();", book, "Service")
    entities = [part.deltas[0].entities.to_pylist() for part in (one, other, again)]
    assert entities == [[0], [1], [0]]
    assert [entity.kind for entity in book.rows()] == ["service", "service_relation"]


def test_metrics_that_share_a_state_share_its_list() -> None:
    """The store gets the column once, and the name of the other one."""
    oal = "a = from(Endpoint.*).count(); b = from(Endpoint.*).cpm();"
    for part in contribute([row()], oal, EntityBook()).deltas:
        assert lists(part) == {"a": [1]}
        assert part.shared == {"b": "a"}


def test_a_minute_alone_is_its_hour_and_its_day() -> None:
    """The columns of states are made once."""
    oal = "p = from(Endpoint.latency).percentile2(10);"
    minute, hour, day = contribute([row(), row(latency=25)], oal, EntityBook()).deltas
    assert lists(minute) == {"p": ["0,2"]}
    assert minute.cells["p"] is hour.cells["p"] is day.cells["p"]
    buckets = [part.buckets.to_pylist() for part in (minute, hour, day)]
    assert buckets == [[202603011000], [2026030110], [20260301]]


def test_sources_without_a_layer_have_a_fixed_one() -> None:
    """A database is of a virtual layer, whatever its rows say."""
    book = EntityBook()
    rows = [{"time": START, "name": "db", "latency": 1}]
    contribute(rows, "m = from(DatabaseAccess.*).count();", book, "DatabaseAccess")
    (entity,) = book.rows()
    assert entity.layers == {"VIRTUAL_DATABASE"}
