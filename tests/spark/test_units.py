"""Parts of the pipeline that need no Spark: entities, names of files, checkpoints, settings."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

pytest.importorskip("pyspark")

from batchmill.aggregate import EntityBook
from batchmill.errors import ConfigError
from batchmill.sources import service_id
from batchmill.spark import PipelineError, PipelineSettings
from batchmill.spark.input.base import Choice, Input
from batchmill.spark.input.books import Account, Books, Plan
from batchmill.spark.input.choice import Pace
from batchmill.spark.input.segments import local_path, source_of
from batchmill.spark.runtime.checkpoint import open_checkpoint
from batchmill.spark.runtime.stream import StreamRun
from batchmill.spark.runtime.takeover import Marks
from batchmill.spark.settings import trigger_seconds
from batchmill.store import StoreError

if TYPE_CHECKING:
    from batchmill.spark.batch.writer import StreamWriter


def test_entities_are_numbered_once_and_gather_their_layers() -> None:
    """The same id from two sources is one entity, with the layers of both."""
    book = EntityBook()
    id_ = service_id("s", normal=True)
    assert book.number("service", id_, ("s",), {"MESH"}) == 0
    assert book.number("endpoint", id_, ("s", "e"), set()) == 1
    assert book.number("service", id_, ("s",), {"GENERAL"}) == 0
    assert [row.layers for row in book.rows()] == [{"MESH", "GENERAL"}, frozenset()]


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


def test_a_checkpoint_keeps_its_identity(tmp_path: Path) -> None:
    """It has the same id each time, is fresh until a batch began, and knows the last one done."""
    first = open_checkpoint(tmp_path, "main", "store-1")
    again = open_checkpoint(tmp_path, "main", "store-1")
    assert (first.id, first.marks()) == (again.id, Marks(None, None))
    books = first.books(set, 1.0, 8, write=True)
    assert first.marks() == Marks(None, None)
    books.begin(Plan(0, 1.0, 8, ("/a.parquet",)))
    assert first.marks() == Marks(None, 0)
    assert (first.segments_until(None), first.segments_until(0)) == (0, 1)
    books.finish(0)
    assert first.marks() == Marks(0, 0)
    assert first.segments_until(0) == 1


def test_what_a_killed_pipeline_was_writing_is_removed_from_the_checkpoint(tmp_path: Path) -> None:
    """When the next one opens it."""
    left = tmp_path / ".progress.json.1f.tmp"
    left.touch()
    os.utime(left, (1000, 1000))
    open_checkpoint(tmp_path, "main", "store-1")
    assert not left.exists()


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
        ("target_batch_s", -1),
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


@pytest.mark.parametrize(
    ("trigger", "seconds"),
    [
        (0, 0.0),
        (0.25, 0.25),
        ("10 seconds", 10.0),
        ("1 second", 1.0),
        ("500 milliseconds", 0.5),
        ("interval 2 Minutes", 120.0),
        ("1 hour 30 minutes", 5400.0),
        ("1 day", 86_400.0),
    ],
)
def test_a_trigger_in_seconds(trigger: float | str, seconds: float) -> None:
    """As a number, or with units."""
    assert trigger_seconds(trigger) == seconds


@pytest.mark.parametrize(
    "trigger", ["", "10", "seconds", "-1 seconds", "1 month", "2 days", "1 s x"]
)
def test_a_trigger_that_is_no_time(trigger: str) -> None:
    """The error says what one looks like."""
    with pytest.raises(ConfigError, match="10 seconds"):
        trigger_seconds(trigger)


def test_a_settle_that_failed_does_not_end_the_stream(tmp_path: Path) -> None:
    """Called in another thread, it leaves its plan in the books: the stream runs it first."""
    books = Books(tmp_path, Account())
    books.open()
    choices = [Choice(1, ("/a",)), Choice(1, ("/b",))]
    batches: list[tuple[int, bool]] = []
    reports: list[Any] = []

    def write(plan: Plan, paths: Any) -> Any:
        batches.append((plan.batch, plan.has_input))
        if len(batches) == 2:
            raise StoreError("the store does not answer")
        return SimpleNamespace(with_upkeep=lambda seconds: plan.batch)

    writer = SimpleNamespace(
        divide=lambda: 2,
        latest=lambda now: None,
        clock_step=lambda now: 0.0,
        settled=None,
        jvm_is_gone=False,
        write=write,
        must_settle=lambda *_, **__: True,
    )
    source = SimpleNamespace(
        choose=lambda pace: choices.pop(0) if choices else None, segments=lambda plan: ()
    )
    run = StreamRun(
        cast("StreamWriter", writer),
        books,
        cast("Input", source),
        reports.append,
        lambda: False,
        pace=Pace(None),
        clock=lambda: 0.0,
    )
    assert run._run_next()
    with pytest.raises(StoreError):
        run.settle()
    assert run._run_next()
    assert not run._run_next()
    assert batches == [(0, True), (1, False), (1, False), (2, True)]
    assert reports == [0, 1, 2]
