"""Parts of the pipeline that need no Spark: SQL text, deltas, columns, segments, checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.parquet as pq

from batchmill.aggregate import EntityBook
from batchmill.errors import ConfigError
from batchmill.oal import load
from batchmill.sources import builtin_catalog, service_id
from batchmill.spark import PipelineError, PipelineSettings
from batchmill.spark import sql as sql_module
from batchmill.spark.input.reader import ColumnTypeError, project
from batchmill.spark.input.segments import (
    Segment,
    cut,
    find_corrupt,
    inspect,
    local_path,
    source_of,
)
from batchmill.spark.l1.plan import SourcePlan
from batchmill.spark.l2.writer import plans_for
from batchmill.spark.runtime.checkpoint import open_checkpoint

ENDPOINT = builtin_catalog().source("Endpoint")


def condition(text: str) -> str:
    """The SQL of one filter on Endpoint."""
    (metric,) = load(f"x = from(Endpoint.*).filter({text}).count();")
    (made,) = metric.states[0].where
    return f"({sql_module.condition(made)})"


def plan(script: str) -> SourcePlan:
    """The plan of a script's one source."""
    (made,) = plans_for(load(script), PipelineSettings()).values()
    return made


@pytest.mark.parametrize(
    ("value", "sql"),
    [
        (None, "NULL"),
        (True, "true"),
        (7, "7L"),
        (2**63 - 1, "9223372036854775807L"),
        (2**63, "CAST('9223372036854775808' AS DECIMAL(38,0))"),
        ("it's", "'it\\'s'"),
        ("a\\b", "'a\\\\b'"),
    ],
)
def test_literals_are_quoted(value: object, sql: str) -> None:
    """Nothing in a value ends its own literal."""
    assert sql_module.literal(value) == sql


@pytest.mark.parametrize(
    ("text", "sql"),
    [
        ("status == true", "(`status` = true)"),
        ('rpcStatusCode != "0"', "(`rpcStatusCode` <> '0')"),
        ("rpcStatusCode == null", "(`rpcStatusCode` IS NULL)"),
        ("rpcStatusCode != null", "(`rpcStatusCode` IS NOT NULL)"),
        ("httpResponseStatusCode in [200, 404]", "(`httpResponseStatusCode` IN (200L, 404L))"),
        ('name like "a%"', "(STARTSWITH(`name`, 'a'))"),
        ('name like "%a"', "(ENDSWITH(`name`, 'a'))"),
        ('name like "%a%"', "(CONTAINS(`name`, 'a'))"),
        ('name like "a"', "(false)"),
        ('name like "%"', "(`name` IS NOT NULL)"),
        ("type == RequestType.HTTP", "(`type` = 'HTTP')"),
        ('tag["k"] == "v"', "(`tag`['k'] = 'v')"),
        ("sideCar.internalRequestLatencyNanos > 5", None),
    ],
)
def test_conditions_are_native_sql(text: str, sql: str | None) -> None:
    """Each comparison as the language means it."""
    made = condition(text)
    assert made == (sql or "(`sideCar`.`internalRequestLatencyNanos` > 5L)")


def test_equal_states_are_computed_once() -> None:
    """cpm, average, percent and apdex of one source share one count; metrics share a percentile."""
    made = plan(
        """
        cpm = from(Endpoint.*).cpm();
        avg = from(Endpoint.latency).longAvg();
        sla = from(Endpoint.*).percent(status == true);
        apdex = from(Endpoint.latency).apdex(serviceName, status);
        p = from(Endpoint.latency).percentile2(10);
        old = from(Endpoint.latency).percentile(10);
        """
    )
    recipe = made.recipe
    # One count, one sum, the matches of percent, two of apdex; one list.
    assert len(recipe.totals) == 5
    assert len(recipe.tallies) == len(recipe.listings) == 1
    columns = {column for own in made.aggregator.plan.cells.values() for column in own}
    assert columns == {*recipe.totals, *recipe.tallies}


def test_tallies_of_one_value_share_a_list_where_their_buckets_fit() -> None:
    """Buckets of 10 fill those of 100; those of 15 are counted by themselves."""
    made = plan(
        """
        p = from(Endpoint.latency).percentile2(10);
        ok = from(Endpoint.latency).filter(status == true).percentile2(10);
        h = from(Endpoint.latency).histogram(100, 20);
        odd = from(Endpoint.latency).histogram(15, 20);
        """
    )
    assert sorted(made.recipe.keys.values()) == [
        "CAST(`latency` DIV 10 AS INT)",
        "CAST(`latency` DIV 15 AS INT)",
    ]
    assert len(made.recipe.tallies) == 4
    assert len(made.recipe.listings) == 2


def test_a_condition_is_computed_once_for_all_its_metrics() -> None:
    """Metrics with the same filter share it, alone or with others, in whatever order."""
    made = plan(
        """
        a = from(Endpoint.*).filter(status == true).count();
        b = from(Endpoint.latency).filter(status == true).sum();
        c = from(Endpoint.*).filter(status == true).filter(latency > 5).count();
        d = from(Endpoint.*).filter(latency > 5).percent(status == true);
        """
    )
    assert sorted(made.recipe.conditions.values()) == ["`latency` > 5L", "`status` = true"]
    # Of all that are slow, of the successful, of both; and the sum of the successful.
    assert len(made.recipe.totals) == 4


def test_a_plan_reads_only_the_columns_it_needs() -> None:
    """Those of its metrics, its entity, and those that every row must have."""
    made = plan("a = from(Endpoint.*).filter(status == true).count();")
    assert made.needed == {"status", "latency", "name", "serviceName", "serviceLayer"}


def segments_of(*rows: int) -> list[Segment]:
    """Segments with so many rows each."""
    return [Segment(f"{i}", "Endpoint", n, pa.schema([])) for i, n in enumerate(rows)]


@pytest.mark.parametrize(
    ("rows", "cores", "slices"),
    [
        ([5, 5, 5, 5], 2, [[5, 5], [5, 5]]),
        ([9, 1, 1, 1], 2, [[9], [1, 1, 1]]),
        ([10], 2, [[10]]),
        ([3_000_000], 2, []),  # a core would have nothing to do
        ([0, 0], 2, [[0, 0]]),
        ([5] * 20, 16, []),  # too many branches for one query
        ([], 2, []),
    ],
)
def test_slices_have_about_as_many_rows(
    rows: list[int], cores: int, slices: list[list[int]]
) -> None:
    """Neighbours stay together; every segment is in one slice."""
    made = cut(segments_of(*rows), cores)
    assert [[row.rows for row in few] for few in made] == slices


def test_entities_are_numbered_once_and_gather_their_layers() -> None:
    """The same id from two sources is one entity, with the layers of both."""
    book = EntityBook()
    id_ = service_id("s", normal=True)
    assert book.number("service", id_, ("s",), {"MESH"}) == 0
    assert book.number("endpoint", id_, ("s", "e"), set()) == 1
    assert book.number("service", id_, ("s",), {"GENERAL"}) == 0
    assert [row.layers for row in book.rows()] == [{"MESH", "GENERAL"}, frozenset()]


def physical(**columns: pa.DataType) -> pa.Schema:
    """The columns of a file."""
    return pa.schema([("time", pa.timestamp("us", tz="UTC")), *columns.items()])


def test_missing_columns_are_read_as_nulls() -> None:
    """They are not asked of the file; a required one makes every row invalid."""
    made = project(ENDPOINT, ("latency", "name"), physical(name=pa.string()))
    assert made.schema.names == ["time", "name"]
    assert "CAST(NULL AS int) AS `latency`" in made.columns
    assert [reason for _, reason in made.checks][-1] == "no latency"


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.float64(), pa.bool_(), pa.uint64(), pa.decimal128(9), pa.date32()]
)
def test_a_column_of_the_wrong_type_is_not_understood(kind: pa.DataType) -> None:
    """The error names the column, what it is and what it should be."""
    with pytest.raises(ColumnTypeError, match=r"column latency: .*, where int is expected"):
        project(ENDPOINT, ("latency",), physical(latency=kind))


@pytest.mark.parametrize("kind", [pa.int64(), pa.string(), pa.date32(), pa.time64("us")])
def test_a_time_that_is_no_timestamp_is_not_understood(kind: pa.DataType) -> None:
    """A number could be seconds or milliseconds: it is not guessed."""
    with pytest.raises(ColumnTypeError, match="column time"):
        project(ENDPOINT, (), pa.schema([("time", kind)]))


@pytest.mark.parametrize(
    ("path", "local"),
    [
        ("file:///a/b.parquet", "/a/b.parquet"),
        ("file:/a/b.parquet", "/a/b.parquet"),
        ("/a/b.parquet", "/a/b.parquet"),
        ("s3a://bucket/b.parquet", None),
        ("hdfs://host/b.parquet", None),
    ],
)
def test_the_name_of_a_file_here(path: str, local: str | None) -> None:
    """Spark's names for local files, with one slash or three; others lie elsewhere."""
    assert local_path(path) == local


def test_a_segment_is_of_the_source_that_its_folder_names() -> None:
    """The last folder, whatever lies above it."""
    assert source_of("file:///a/spool/Endpoint/0.parquet") == "Endpoint"


def test_a_look_tells_good_from_bad(tmp_path: Path) -> None:
    """Rows and columns of the good ones; a reason for the others."""
    good, bad = tmp_path / "S" / "good.parquet", tmp_path / "S" / "bad.parquet"
    good.parent.mkdir()
    pq.write_table(pa.table({"a": [1, 2]}), good)
    bad.write_bytes(b"PAR1 no parquet PAR1")
    readable, broken = inspect([path.as_uri() for path in (good, bad, tmp_path / "S" / "gone")])
    assert [(result.source, result.rows, result.schema.names) for result in readable] == [
        ("S", 2, ["a"])
    ]
    assert [(segment.path.rpartition("/")[2], segment.reason) for segment in broken] == [
        ("bad.parquet", "corrupt"),
        ("gone", "missing"),
    ]
    assert find_corrupt(readable) == []
    good.unlink()
    assert [segment.reason for segment in find_corrupt(readable)] == ["missing"]


def test_a_checkpoint_keeps_its_identity(tmp_path: Path) -> None:
    """It has the same id each time, is fresh until a batch began, and knows the last one done."""
    first = open_checkpoint(tmp_path, "main", "store-1")
    again = open_checkpoint(tmp_path, "main", "store-1")
    assert (first.id, first.fresh, first.committed) == (again.id, True, None)
    for folder, names in (("offsets", ("0", "1", ".1.crc")), ("commits", ("0", ".0.crc"))):
        (tmp_path / "spark" / folder).mkdir(parents=True)
        for name in names:
            (tmp_path / "spark" / folder / name).touch()
    assert (first.fresh, first.committed) == (False, 0)


def test_a_checkpoint_is_of_one_stream(tmp_path: Path) -> None:
    """Another stream is refused; a file that cannot be read, too."""
    open_checkpoint(tmp_path, "main", "store-1")
    with pytest.raises(PipelineError, match="a checkpoint folder of its own"):
        open_checkpoint(tmp_path, "other", "store-1")
    for text in ("", "[]", json.dumps({"id": "x"})):
        (tmp_path / "batchmill.json").write_text(text, "utf-8")
        with pytest.raises(PipelineError, match="put it back from a backup"):
            open_checkpoint(tmp_path, "main", "store-1")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_batch_bytes", 0),
        ("max_batch_files", 0),
        ("max_ahead_s", -1),
        ("span_wait_s", float("nan")),
        ("late_after_minutes", True),
        ("top_n", 0),
        ("ttl_days", 0),
        ("apdex_ms", {"a": 0}),
        ("apdex_ms", {"a": True}),
        ("slow_database_ms", "fast"),
        ("slow_cache_ms", "redis:10"),
        ("top_n", 1.5),
        ("max_batch_files", 1.5),
    ],
)
def test_settings_check_themselves(name: str, value: Any) -> None:
    """What can never work is refused at once, not when the first batch runs."""
    with pytest.raises(ConfigError):
        PipelineSettings(**{name: value})
