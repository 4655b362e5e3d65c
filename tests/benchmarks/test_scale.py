"""The benchmark of scale: its data, its model, and the page that tells of its results."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest

pytest.importorskip("pyspark")

from benchmarks.scale import model as scale_model
from benchmarks.scale.batches import MINUTES, Case, write_batch
from tests.kit.files import ROOT

PAGE = ROOT / "docs" / "scale.md"


def groups(folder: Path) -> list[tuple[str, int]]:
    """The entity and the minute of every event."""
    tables = [pq.read_table(path) for path in sorted(folder.iterdir())]
    return [
        (name, moment.minute)
        for table in tables
        for name, moment in zip(table["name"].to_pylist(), table["time"].to_pylist(), strict=True)
    ]


def test_a_batch_has_as_many_groups_as_it_says(tmp_path: Path) -> None:
    """Every group has as many events as the others; the next batch has other minutes."""
    case = Case(2_000, 500)
    for number in (0, 1):
        (tmp_path / str(number)).mkdir()
        write_batch(tmp_path / str(number), case, number)
    first, second = (groups(tmp_path / str(number)) for number in (0, 1))
    assert len(first) == 2_000
    assert len(set(first)) == 500
    assert {first.count(group) for group in set(first)} == {4}
    assert len({minute for _, minute in first}) == MINUTES
    assert not set(first) & set(second)


def test_a_batch_again_has_the_same_groups(tmp_path: Path) -> None:
    """So that the store has to update each of its rows."""
    case = Case(1_000, 100, again=True)
    for number in (0, 1):
        (tmp_path / str(number)).mkdir()
        write_batch(tmp_path / str(number), case, number)
    first, second = (groups(tmp_path / str(number)) for number in (0, 1))
    assert set(first) == set(second)


def test_the_model_adds_up() -> None:
    """Throughput grows with cores, and with it what PostgreSQL has to merge."""
    model = scale_model.Model(executors=2.0, rows=0.1, new_rows=4.0, batch=0.2)
    assert model.events(10) == 5_000_000
    assert model.merged(10) == 500_000
    assert model.servers(10) == 2.0


def test_large_numbers_are_written_out() -> None:
    """With three digits that count, and without an exponent; what nobody knows is said."""
    results = json.loads(scale_model.SCALE_JSON.read_text("utf-8"))
    lines = "\n".join(scale_model.tables(results)[-1])
    assert not re.search(r"\de\+", lines)
    assert re.search(r"\| 100 \| \d+ million \|", lines)
    assert re.search(r"\| 1,000 \| \d,\d{3} million, if they reach it: not known \|", lines)


def test_the_page_has_the_tables_of_the_results() -> None:
    """A run that is committed without its page is noticed."""
    results = json.loads(scale_model.SCALE_JSON.read_text("utf-8"))
    page = PAGE.read_text("utf-8").splitlines()
    for table in scale_model.tables(results):
        assert "\n".join(table) in "\n".join(page)
