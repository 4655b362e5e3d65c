"""Which failures are a file's fault, the machine's or Spark's; without Spark."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
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
    is_content_error,
    is_disk_full,
)
from batchmill.spark.input.quarantine import Quarantine
from batchmill.spark.input.segments import BadSegment, Segment, find_corrupt, inspect, reason_for
from tests.kit.files import fill, small_disk

UNREADABLE = "[FAILED_READ_FILE.NO_HINT] Encountered error while reading file file:///s/a.parquet."


@pytest.mark.parametrize(
    "text",
    [
        f"{UNREADABLE}\njava.lang.ClassNotFoundException: org.apache.hadoop.io.BrotliCodec",
        f"{UNREADABLE}\njava.lang.RuntimeException: footer is too large: 2802491344to be read",
        f"Job aborted due to stage failure: Task 0\n{UNREADABLE}\nCaused by: "
        "org.apache.parquet.io.ParquetDecodingException: can not read value at 1",
        "[FAILED_READ_FILE.PARQUET_COLUMN_DATA_TYPE_MISMATCH] Data type mismatches",
    ],
)
def test_what_is_in_a_file_is_its_fault(text: str) -> None:
    """Spark says that it failed while it read a file, and why has to do with its bytes."""
    assert is_content_error(text)


@pytest.mark.parametrize(
    "text",
    [
        # What a stopped context says.
        'java.lang.NullPointerException: Cannot invoke "SparkContext.dagScheduler()"',
        "java.lang.IllegalStateException: Cannot call methods on a stopped SparkContext.",
        "org.apache.spark.SparkException: Job 3 cancelled because SparkContext was shut down",
        "Job aborted due to stage failure: ExecutorLostFailure (executor 1 exited)",
        "java.lang.OutOfMemoryError: Java heap space",
        f"{UNREADABLE}\njava.io.IOException: Input/output error",
        f"{UNREADABLE}\njava.io.FileNotFoundException: /s/a.parquet (Too many open files)",
        f"{UNREADABLE}\njava.io.FileNotFoundException: /s/a.parquet (Permission denied)",
        f"{UNREADABLE}\njava.net.SocketTimeoutException: Read timed out",
        f"{UNREADABLE}\njava.nio.channels.ClosedByInterruptException",
        "[FAILED_READ_FILE.FILE_NOT_EXIST] File does not exist.",
        "[PATH_NOT_FOUND] Path does not exist: file:/s/a.parquet.",
    ],
)
def test_what_passes_is_not_the_files_fault(text: str) -> None:
    """Spark stopped, a worker lost, memory, disks, networks: the file may be as good as any."""
    assert not is_content_error(text)


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


def reasons(*paths: Path) -> list[str]:
    """Why each is bad; none of them is good."""
    good, bad = inspect([f"file:{path}" for path in paths])
    assert good == []
    return [bad_segment.reason for bad_segment in bad]


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
    assert reasons(circle, inner, latin, nowhere) == ["unreadable", "corrupt", "corrupt", "missing"]


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
        (bad,) = inspect([f"file:{path}"])[1]
        (again,) = find_corrupt([Segment(bad.path, "Endpoint", 3, pa.schema([]))])
        assert bad.reason == again.reason == "not permitted"
        aside = folder / "aside"
        Quarantine(aside).add_segment(bad)
        assert [path.name for path in aside.glob("*/*")] == ["a.parquet.reason"]
        why = (aside / "Endpoint" / "a.parquet.reason").read_text("utf-8")
    assert why.startswith("not permitted: PermissionError")
    assert "only its reason is kept" in caplog.text


@contextlib.contextmanager
def no_more_files() -> Iterator[Callable[[], None]]:
    """Every file that this process may open is open; yields what closes them again."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.open(os.devnull, os.O_RDONLY)]

    def close() -> None:
        while held:
            os.close(held.pop())

    resource.setrlimit(resource.RLIMIT_NOFILE, (held[0] + 8, before[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        yield close
    finally:
        close()
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


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
        inspect([f"file:{path}"])


def test_a_fault_that_passes_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are closed while it waits: the segment is good."""
    path = segment(tmp_path)
    with no_more_files() as close:
        monkeypatch.setattr("batchmill.spark.input.segments.time.sleep", lambda seconds: close())
        good, bad = inspect([f"file:{path}"])
    assert (good[0].rows, bad) == (3, [])


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
    assert len(list(aside.folder.glob("*/*"))) == 2


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


def test_a_quarantine_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    """A file in its place."""
    (tmp_path / "aside").write_text("in the way")
    bad = BadSegment(f"file:{segment(tmp_path)}", "Endpoint", "corrupt", "why")
    with pytest.raises(PipelineError, match=r"cannot be written .* let this user write there"):
        Quarantine(tmp_path / "aside").add_segment(bad)
