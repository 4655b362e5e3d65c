"""Checkpoints of version 1, in which Spark kept the books, are taken over.

``version_1.tar.gz`` has checkpoints and stores that version 1 has written:

- ``planned``: thirteen segments of ``/spool/Endpoint``, one a batch; the commit of batch 11 failed.
- ``stored``: the same, but batch 11 is in the store, and Spark did not mark it as done.
- ``kafka-…``: 23 messages in three partitions of a topic ``spans``, three or four a batch, up to a
  batch that is only planned, or done.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from pyspark.sql import SparkSession

from batchmill.spark import PipelineError
from batchmill.spark.input.books import Plan
from batchmill.spark.runtime import takeover
from batchmill.spark.runtime.checkpoint import Checkpoint
from batchmill.spark.runtime.takeover import Marks
from batchmill.store import CheckpointMismatchError
from tests.kit.pipelines import (
    ONE_AT_A_TIME,
    SMALL,
    counted,
    differences,
    endpoint_events,
    expected_of,
    pipeline,
    stored,
    write_segment,
)

ARCHIVE = Path(__file__).with_name("version_1.tar.gz")
ROWS = endpoint_events(130)
HARM = ("gone", "half", "empty")


def unpack(name: str, folder: Path) -> Path:
    """A checkpoint, and its store, as version 1 has left it; its spool is ``folder / "spool"``."""
    with tarfile.open(ARCHIVE) as archive:
        # The first releases of Python 3.11 have no filters.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        members = [item for item in archive.getmembers() if item.name.startswith(f"{name}/")]
        for item in members:
            item.name = item.name.removeprefix(f"{name}/")
        archive.extractall(folder, members)
    for file in (folder / "checkpoint" / "spark" / "sources" / "0").iterdir():
        text = file.read_text("utf-8")
        file.write_text(text.replace("file:///spool", f"file://{quote(str(folder / 'spool'))}"))
    return folder / "checkpoint"


def fill(folder: Path) -> None:
    """The spool of version 1."""
    for number in range(13):
        write_segment(folder / "spool", "Endpoint", ROWS[number::13], f"{number} é%", number)


@pytest.mark.parametrize(("name", "remove_read"), [("planned", True), ("stored", False)])
def test_a_stream_of_version_1_goes_on(
    spark: SparkSession, tmp_path: Path, name: str, remove_read: bool
) -> None:
    """Its batch that is not done is repeated, segments that were read are not read again.

    The first one was removed by version 1.
    """
    checkpoint = unpack(name, tmp_path)
    fill(tmp_path)
    (tmp_path / "spool" / "Endpoint" / "0 é%.parquet").unlink()
    given: dict[str, Any] = {"oal": SMALL, "settings": ONE_AT_A_TIME, "remove_read": remove_read}
    with pipeline(spark, tmp_path, **given) as running:
        assert running.progress().unread_segments == (2 if name == "planned" else 1)
        assert (checkpoint / "spark").exists()
        reports = running.run_available()
        applied = [(report.number, report.applied) for report in reports]
        assert applied == [(11, name == "planned"), (12, True)]
        assert differences(stored(running.store), expected_of(ROWS)) == []
        assert counted(running.store, "rows") == {("Endpoint", ""): 130}
        assert running.run_available() == []
        assert Checkpoint(checkpoint).segments_until(12) == 13
    assert not (checkpoint / "spark").exists()
    left = list((tmp_path / "spool").rglob("*.parquet"))
    assert len(left) == (0 if remove_read else 12)


def test_a_crash_in_the_take_over(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The books are written, Spark's files are still there: those count no more."""
    checkpoint = unpack("planned", tmp_path)
    fill(tmp_path)
    monkeypatch.setattr(takeover, "remove", lambda folder: None)
    with pipeline(spark, tmp_path, oal=SMALL, settings=ONE_AT_A_TIME) as running:
        running.run_available()
        assert (checkpoint / "spark").exists()
        monkeypatch.undo()
        assert running.run_available() == []
        assert differences(stored(running.store), expected_of(ROWS)) == []
    assert not (checkpoint / "spark").exists()


def test_nothing_is_written_without_a_claim(spark: SparkSession, tmp_path: Path) -> None:
    """A checkpoint that does not belong to the store stays as it is."""
    checkpoint = unpack("planned", tmp_path)
    fill(tmp_path)
    (tmp_path / "metrics.db").unlink()
    with (
        pipeline(spark, tmp_path, oal=SMALL) as running,
        pytest.raises(CheckpointMismatchError),
    ):
        running.run_available()
    assert (checkpoint / "spark" / "offsets" / "11").exists()
    assert not (checkpoint / "books.jsonl").exists()


def test_an_empty_spool_may_not_be_mounted(spark: SparkSession, tmp_path: Path) -> None:
    """If names of its segments were forgotten now, they would count again later."""
    checkpoint = unpack("planned", tmp_path)
    with pipeline(spark, tmp_path, oal=SMALL, settings=ONE_AT_A_TIME) as running:
        with pytest.raises(PipelineError, match="if it is not mounted, mount it"):
            running.run_available()
        assert (checkpoint / "spark" / "offsets" / "11").exists()
        fill(tmp_path)
        assert [report.number for report in running.run_available()] == [11, 12]


def test_the_files_of_a_spool_are_read(tmp_path: Path) -> None:
    """Names that exist are kept; what Spark had only listed is unread."""
    checkpoint = unpack("planned", tmp_path)
    spool = tmp_path / "spool" / "Endpoint"
    names = [str(spool / f"{number} é%.parquet") for number in range(13)]
    assert takeover.marks_of(checkpoint) == Marks(10, 11)
    account = takeover.account_of(checkpoint, lambda: {*names[5:]}, 7.5, 16)
    assert (account.done, account.segments) == (10, 11)
    assert account.read == set(names[5:11])
    assert account.open_plan == Plan(11, 7.5, 16, (names[11],))
    # Spark writes its log of files first, then the plan of the batch.
    (checkpoint / "spark" / "offsets" / "11").unlink()
    account = takeover.account_of(checkpoint, lambda: {*names}, 7.5, 16)
    assert (account.done, account.open_plan, account.segments) == (10, None, 11)
    assert account.read == set(names[:11])


@pytest.mark.parametrize(
    ("broken", "how"),
    [
        *((f"sources/0/{name}", how) for name in ("10", "9.compact") for how in HARM),
        *(("offsets/11", how) for how in HARM if how != "gone"),
    ],
)
def test_a_log_that_cannot_be_read_is_an_error(tmp_path: Path, broken: str, how: str) -> None:
    """Names that are missing would be read again."""
    checkpoint = unpack("planned", tmp_path)
    file = checkpoint / "spark" / broken
    if how == "gone":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-20] if how == "half" else b"")
    with pytest.raises(PipelineError, match="cannot be taken over"):
        takeover.account_of(checkpoint, set, 1.0, 8)


@pytest.mark.parametrize(
    ("name", "done", "offsets", "plan"),
    [
        ("kafka-planned-0", None, {}, {0: (0, 1), 1: (0, 1), 2: (0, 1)}),
        ("kafka-planned-2", 1, {0: 2, 1: 2, 2: 2}, {0: (2, 3), 1: (2, 3), 2: (2, 3)}),
        ("kafka-done-6", 6, {0: 10, 1: 4, 2: 9}, None),
    ],
)
def test_the_offsets_of_a_topic_are_read(
    tmp_path: Path,
    name: str,
    done: int | None,
    offsets: dict[int, int],
    plan: dict[int, tuple[int, int]] | None,
) -> None:
    """How far it was read, and the messages of a batch that is not done."""
    account = takeover.account_of(unpack(name, tmp_path), set, 7.5, 16)
    assert account.done == done
    assert account.offsets == {"spans": offsets}
    if plan is None:
        assert account.open_plan is None
    else:
        number = 0 if done is None else done + 1
        assert account.open_plan == Plan(number, 7.5, 16, topic="spans", offsets=plan)


_MEASURE = """
import json, resource, sys, time
from pathlib import Path
from batchmill.spark.runtime.checkpoint import Checkpoint
folder = Path(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
began = time.process_time()
present = {"/spool/Span/%020d.parquet" % number for number in range(0, 1_000_000, 1000)}
books = Checkpoint(folder).books(lambda: present, 1.0, 8, write=True)
seconds = time.process_time() - began
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps([len(books.read()), books.done, seconds, (after - before) / 1024]))
"""


@pytest.mark.system
def test_a_log_of_a_million_names_is_taken_over_in_seconds(tmp_path: Path) -> None:
    """In the memory of the names that still exist; the books are as small as those."""
    spark = tmp_path / "spark"
    log = spark / "sources" / "0"
    for folder in (spark / "offsets", spark / "commits", log):
        folder.mkdir(parents=True)
    last = 99_999
    (spark / "commits" / str(last)).write_text("v1\n{}")
    (spark / "offsets" / str(last)).write_text(f'v1\n{{}}\n{{"logOffset":{last}}}')
    with (log / f"{last}.compact").open("w") as file:
        file.write("v1")
        for number in range(1_000_000):
            path = f"file:///spool/Span/{number:020}.parquet"
            file.write(f'\n{{"path":"{path}","timestamp":1,"batchId":{number // 10}}}')
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    kept, batch, seconds, mebibytes = json.loads(done.stdout)
    assert (kept, batch) == (1000, last)
    assert seconds < 10
    assert mebibytes < 20
    assert (tmp_path / "books.jsonl").stat().st_size < 60_000
    assert not spark.exists()
