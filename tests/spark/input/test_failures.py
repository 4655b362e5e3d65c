"""Which failures are a file's fault, the machine's or Spark's; without Spark."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("pyspark")

from batchmill.spark import PipelineError
from batchmill.spark.failures import (
    disk_full_error,
    error_text,
    explain_full_disk,
    is_disk_full,
    is_out_of_memory,
)
from batchmill.spark.files.quarantine import Quarantine
from batchmill.spark.input.rows import SPAN, open_segment
from batchmill.spark.input.segments import BadSegment, read_segment, reason_for
from tests.kit.files import fill, no_more_files, small_disk


def test_all_causes_are_reported_and_no_stack() -> None:
    """The reason may lie deep; names in a stack are none."""
    error = RuntimeError("outer")
    error.__cause__ = ValueError("inner\n\tat org.apache.spark.SparkContext.runJob(File.scala)")
    assert error_text(error) == "RuntimeError: outer\nValueError: inner"


def test_a_full_disk_is_known_by_number_and_by_word() -> None:
    """Python has a number for it, Java a text."""
    assert is_disk_full(OSError(errno.ENOSPC, "x"))
    assert is_disk_full(OSError(errno.EDQUOT, "x"))
    assert is_disk_full(RuntimeError("java.io.IOException: No space left on device"))
    assert not is_disk_full(OSError(errno.EIO, "x"))
    assert disk_full_error(OSError(errno.EIO, "x"), [Path("/")]) is None


@pytest.mark.parametrize(
    "text",
    [
        "java.lang.OutOfMemoryError: Java heap space",
        "org.apache.spark.SparkException: Job aborted: GC overhead limit exceeded",
        "Total size of serialized results is bigger than spark.driver.maxResultSize (4.0 GiB)",
        "ExecutorLostFailure (executor 1 exited caused by one of the running tasks)",
    ],
)
def test_too_little_memory_is_known_by_what_java_says(text: str) -> None:
    """Also as the cause of another error."""
    error = RuntimeError("a batch failed")
    error.__cause__ = ValueError(text)
    assert is_out_of_memory(error)
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("a batch failed"))


def test_of_several_folders_the_full_one_is_named(tmp_path: Path) -> None:
    """Also if Spark has not made it yet."""
    with small_disk(tmp_path / "small") as small:
        left = fill(small)
        with (
            pytest.raises(PipelineError, match=f"make room in {small}/carry .0 bytes are free"),
            explain_full_disk(tmp_path, small / "carry", Path("/")),
        ):
            (small / "more").write_bytes(b"x" * 10_000)
        left.unlink()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (pa.ArrowInvalid("Parquet magic bytes not found"), "corrupt"),
        (OSError("Couldn't deserialize thrift"), "corrupt"),
        (pa.ArrowNotImplementedError("x"), "corrupt"),
        (FileNotFoundError(errno.ENOENT, "x"), "missing"),
        (PermissionError(errno.EACCES, "x"), "not permitted"),
        (OSError(errno.ELOOP, "x"), "unreadable"),
        (OSError(errno.EMFILE, "x"), None),
        (OSError(errno.ENFILE, "x"), None),
        (OSError(errno.EIO, "x"), None),
        (OSError(errno.ENOMEM, "x"), None),
        (OSError(errno.ESTALE, "x"), None),
        (pa.ArrowMemoryError("malloc of size 64 failed"), None),
    ],
)
def test_only_a_files_own_faults_set_it_aside(error: Exception, reason: str | None) -> None:
    """What the system cannot do now says nothing about the file."""
    assert reason_for(error) == reason


def segment(folder: Path, name: str = "a") -> Path:
    """A good one."""
    path = folder / "Endpoint" / f"{name}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"latency": [1, 2, 3]}), path)
    return path


def read(path: Path) -> int | BadSegment:
    """How many rows a segment has, all of which are read."""
    return read_segment(f"file:{path}", lambda file: int(open_segment(file, SPAN).read().num_rows))


def reason(path: Path) -> str:
    """Why a segment is bad."""
    bad = read(path)
    assert isinstance(bad, BadSegment)
    assert (bad.path, bad.source) == (f"file:{path}", "Endpoint")
    return bad.reason


def test_a_segment_is_read(tmp_path: Path) -> None:
    """What the caller makes of the file is returned; Spark's name or a plain path leads to it."""
    path = segment(tmp_path)
    assert read(path) == 3
    assert read_segment(str(path), lambda file: pq.read_schema(file).names) == ["latency"]


def test_a_segment_that_is_no_parquet_has_a_reason(tmp_path: Path) -> None:
    """Garbage, an empty file, one cut short, none at all, and a page that is spoiled."""
    segment(tmp_path)
    folder = tmp_path / "Endpoint"
    names = ("garbage", "empty", "cut", "gone", "page")
    garbage, empty, cut, gone, page = (folder / f"{name}.parquet" for name in names)
    garbage.write_bytes(b"PAR1 no parquet PAR1")
    empty.write_bytes(b"")
    content = (folder / "a.parquet").read_bytes()
    cut.write_bytes(content[:-9])
    start = pq.read_metadata(folder / "a.parquet").row_group(0).column(0).dictionary_page_offset
    page.write_bytes(content[:start] + b"\xa5" * 20 + content[start + 20 :])
    assert [reason(path) for path in (garbage, empty, cut, page)] == ["corrupt"] * 4
    assert reason(gone) == "missing"
    assert (
        read_segment(str(page), lambda file: int(pq.read_metadata(file).num_rows)) == 3
    )  # a good footer


def test_odd_things_in_a_spool_have_reasons(tmp_path: Path) -> None:
    """A link to nowhere, one in a circle, a folder, a column whose name is no text."""
    folder = segment(tmp_path).parent
    names = ("circle", "folder", "latin1", "nowhere")
    circle, inner, latin, nowhere = (folder / f"{name}.parquet" for name in names)
    circle.symlink_to(circle)
    inner.mkdir()
    pq.write_table(pa.table({"abcdefgh": [1]}), latin)
    latin.write_bytes(latin.read_bytes().replace(b"abcdefgh", b"abc\xe9\xffefg"))
    nowhere.symlink_to(folder / "gone")
    faults = [reason(path) for path in (circle, inner, latin, nowhere)]
    assert faults == ["unreadable", "corrupt", "corrupt", "missing"]


@contextlib.contextmanager
def nobody() -> Iterator[Path]:
    """A folder to work in as a user who may not do everything."""
    with tempfile.TemporaryDirectory(prefix="batchmill-") as name:
        root = os.geteuid() == 0
        Path(name).chmod(0o777)
        if root:
            os.seteuid(65534)
        try:
            yield Path(name)
        finally:
            if root:
                os.seteuid(0)


def test_a_segment_that_may_not_be_read_leaves_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    """It cannot be copied either; that must not stop the stream."""
    with nobody() as folder:
        path = segment(folder)
        path.chmod(0)
        bad = read(path)
        assert isinstance(bad, BadSegment)
        assert bad.reason == "not permitted"
        aside = folder / "aside"
        Quarantine(aside).add_segment(bad)
        assert [path.name for path in aside.glob("*/*")] == ["a.parquet.reason"]
        why = (aside / "Endpoint" / "a.parquet.reason").read_text("utf-8")
    assert why.startswith("not permitted: PermissionError")
    assert "only its reason is kept" in caplog.text


def test_too_many_open_files_are_no_fault_of_the_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is quarantined: a clear error ends the run, and says what to do."""
    path = segment(tmp_path)
    monkeypatch.setattr("batchmill.spark.input.segments.time.sleep", lambda seconds: None)
    with (
        no_more_files(),
        pytest.raises(PipelineError, match=r"a\.parquet cannot be read now .*ulimit -n"),
    ):
        read(path)


def test_a_fault_that_passes_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are closed while it waits: the segment is good."""
    path = segment(tmp_path)
    with no_more_files() as close:
        monkeypatch.setattr("batchmill.spark.input.segments.time.sleep", lambda seconds: close())
        assert read(path) == 3


def test_what_is_in_the_quarantine_stays_if_the_segment_is_gone(tmp_path: Path) -> None:
    """A batch that is run again finds less than before: the copy of then is kept."""
    path = segment(tmp_path / "spool")
    aside = Quarantine(tmp_path / "aside")
    bad = BadSegment(f"file:{path}", "Endpoint", "corrupt", "why")
    aside.add_segment(bad)
    content = path.read_bytes()
    path.unlink()
    aside.add_segment(bad)
    assert (aside.folder / "Endpoint" / "a.parquet").read_bytes() == content
    assert len(list(Path(str(aside.folder)).glob("*/*"))) == 2


def test_a_full_quarantine_is_a_clear_error(tmp_path: Path) -> None:
    """It says where to make room; half a copy is not left behind."""
    path = segment(tmp_path / "spool")
    path.write_bytes(os.urandom(100_000))
    with small_disk(tmp_path / "aside") as small:
        left = fill(small, leave=50_000)
        bad = BadSegment(f"file:{path}", "Endpoint", "corrupt", "why")
        with pytest.raises(PipelineError, match=f"make room in {small} "):
            Quarantine(small).add_segment(bad)
        assert list(small.glob("*/*")) == []
        assert list(small.glob("*/.*")) == []
        left.unlink()
        Quarantine(small).add_segment(bad)
        assert (small / "Endpoint" / "a.parquet").read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("add", "what"),
    [
        (
            lambda aside, _: aside.add_segment(BadSegment("/s/S/a.parquet", "S", "corrupt", "why")),
            "the segment /s/S/a.parquet",
        ),
        (lambda aside, _: aside.add_rows("main", 0, [("S", "/s/part")]), "rows of S"),
        (lambda aside, table: aside.add_deltas("S", "main", 0, table, "why"), "deltas of S"),
    ],
)
def test_a_quarantine_that_cannot_be_written_is_a_clear_error(
    tmp_path: Path, add: Callable[[Quarantine, pa.Table], None], what: str
) -> None:
    """A file in its place."""
    (tmp_path / "aside").write_text("in the way")
    with pytest.raises(
        PipelineError,
        match=f"{what}.* must be written.*cannot be .* let this user write there",
    ):
        add(Quarantine(tmp_path / "aside"), pa.table({"latency": [1]}))


def test_a_batch_that_is_run_again_replaces_its_rows(tmp_path: Path) -> None:
    """Files of an earlier attempt go, and what its tasks have left; other batches keep theirs."""
    aside = Quarantine(tmp_path)

    def add(number: int, *contents: str, left: str = "") -> None:
        staging = Path(str(aside.staging("main", number)), "S")
        staging.mkdir(parents=True)
        for content in (*contents, left):
            (staging / content).write_text(content)
        aside.add_rows("main", number, [("S", str(staging / content)) for content in contents])

    add(0, "a", "b", left="of a task that was run again")
    add(1, "c", left="of another")
    add(0, "d", left="of a third")
    files = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*.*")}
    assert files == {
        Path("S/rows-main-0/0.parquet"): "d",
        Path("S/rows-main-1/0.parquet"): "c",
    }
