"""Paths of a pipeline's folders: local ones, and URIs of Hadoop's file systems."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("pyspark")

from batchmill.errors import ConfigError
from batchmill.spark import PipelineError
from batchmill.spark.files.paths import (
    AnyPath,
    HadoopPath,
    append,
    copy_file,
    create_whole,
    entries_in,
    is_empty,
    is_uri,
    parse_path,
    remove_stale_temporaries,
    remove_tree,
    segments_in,
    write_whole,
)
from batchmill.spark.input.books import NAME, Account, Books, Plan, read_account
from tests.kit.pipelines import pipeline, write_segment
from tests.kit.servers.hadoop import Hdfs, names_in

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def no_session() -> SparkSession:
    """For paths that are not opened."""
    raise AssertionError("a session was asked for")


def uri(text: str) -> HadoopPath:
    """A path that is not opened."""
    return HadoopPath(text, no_session)


@pytest.mark.parametrize(
    ("given", "local"),
    [
        ("/data/spool", "/data/spool"),
        ("file:/data/spool", "/data/spool"),
        ("file:///data/my%20spool", "/data/my spool"),
        (Path("/data/hdfs:"), "/data/hdfs:"),
        ("/data/a:b", "/data/a:b"),
    ],
)
def test_local_paths_stay_local(given: str | Path, local: str) -> None:
    """Those without a scheme, and those of file:."""
    assert parse_path(given, no_session) == Path(local)


def test_a_relative_path_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name with a colon is one, too."""
    monkeypatch.chdir(tmp_path)
    assert parse_path("spool", no_session) == tmp_path.resolve() / "spool"
    assert not is_uri("C:/spool")


@pytest.mark.parametrize("text", ["hdfs://namenode:8020/a/b", "s3a://bucket/a/b", "hdfs:/a/b"])
def test_a_uri_has_what_a_path_has(text: str) -> None:
    """Names, folders above it, and neighbours, without a session."""
    path = parse_path(f"{text}/", no_session)
    root = text.removesuffix("/a/b")
    assert isinstance(path, HadoopPath)
    assert str(path) == text
    assert (path.name, str(path.parent)) == ("b", f"{root}/a")
    assert [str(above) for above in path.parents] == [f"{root}/a", f"{root}/"]
    assert path / "c d%.parquet" == uri(f"{text}/c d%.parquet")
    assert path.with_name("x") == uri(f"{root}/a/x")
    assert len({path, uri(text), uri(f"{root}/a")}) == 2


@pytest.mark.parametrize("text", ["hdfs://namenode", "s3a:bucket"])
def test_a_uri_without_a_path_is_refused(text: str) -> None:
    """It would be somebody else's root."""
    with pytest.raises(ConfigError, match="hdfs://namenode/folder"):
        uri(text)


def test_an_outbox_needs_a_local_checkpoint(tmp_path: Path, spark: SparkSession) -> None:
    """Exporters read it there; it is said before anything is written."""
    with pytest.raises(ConfigError, match=r"checkpoint='hdfs://nowhere.*outbox.*exporters"):
        pipeline(spark, tmp_path, checkpoint="hdfs://nowhere/checkpoint", outbox=True)
    with pytest.raises(ConfigError, match="outside hdfs://nowhere/spool"):
        pipeline(
            spark, tmp_path, spool="hdfs://nowhere/spool", checkpoint="hdfs://nowhere/spool/inner"
        )


@pytest.mark.parametrize(
    ("folder", "advice"),
    [
        ("s3a://bucket/spool", r"--conf spark\.jars\.packages=org\.apache\.hadoop:hadoop-aws:\d"),
        ("s3://bucket/spool", "write s3a:// instead"),
        ("nothing://bucket/spool", r"spark\.jars\.packages"),
    ],
)
def test_a_missing_file_system_is_explained(
    tmp_path: Path, spark: SparkSession, folder: str, advice: str
) -> None:
    """With the jar that is missing, if it is known."""
    with pytest.raises(PipelineError, match=advice):
        pipeline(spark, tmp_path, spool=folder, checkpoint=tmp_path / "checkpoint")


@pytest.fixture(
    params=["local", pytest.param("hdfs", marks=pytest.mark.system), "through the JVM"],
)
def folder(request: pytest.FixtureRequest, spark: SparkSession, tmp_path: Path) -> AnyPath:
    """An empty folder, once of each kind; also a local one through the JVM."""
    if request.param == "local":
        return tmp_path / "folder"
    if request.param == "hdfs":
        return HadoopPath(request.getfixturevalue("hdfs").new_folder(), lambda: spark)
    return HadoopPath(f"file:{tmp_path}/folder", lambda: spark)


def test_both_kinds_of_paths_do_the_same(folder: AnyPath, tmp_path: Path) -> None:
    """Whole files, appended lines, folders that are listed and removed, and the errors."""
    file = folder / "ü {a}*.json"
    assert is_empty(folder)
    assert not folder.is_dir()
    with pytest.raises(FileNotFoundError):
        file.read_bytes()
    folder.mkdir(parents=True, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    assert folder.is_dir()
    assert is_empty(folder)

    assert create_whole(file, b"one")
    assert not create_whole(file, b"two")
    assert file.read_bytes() == b"one"
    write_whole(file, b"three, longer")
    write_whole(file, b"four")
    append(file, 4, b" five")
    append(file, 4, b" six")
    assert file.read_bytes() == b"four six"
    assert [path.name for path in folder.iterdir()] == [file.name], "something hidden is left"

    local = tmp_path / "elsewhere"
    copy_file(file, local)
    copy_file(local, folder / "copy")
    copy_file(folder / "copy", file)
    assert local.read_bytes() == file.read_bytes() == b"four six"
    assert [path.name for path in tmp_path.iterdir() if "elsewhere" in path.name] == ["elsewhere"]

    file.unlink()
    with pytest.raises(FileNotFoundError):
        file.unlink()
    assert not file.exists()
    remove_tree(folder)
    remove_tree(folder)
    assert not folder.exists()


def test_segments_of_both_kinds_of_folders(folder: AnyPath) -> None:
    """At any depth; hidden ones are not listed, known ones only by their names."""
    assert segments_in(folder) == (set(), [])
    names = ("Span/a.parquet", "Span/day=1/b.parquet", "x.parquet/c.parquet")
    others = ("Span/.a.parquet", "_temporary/d.parquet", ".e/f.parquet", "Span/_g.parquet", "h.txt")
    for name in (*names, *others):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_whole(folder / name, b"12345")

    present, new = segments_in(folder, {f"{folder}/{names[0]}"})

    assert present == {f"{folder}/{name}" for name in names}
    assert sorted((segment.path, segment.size) for segment in new) == [
        (f"{folder}/{name}", 5) for name in names[1:]
    ]
    assert all(segment.mtime > 1_700_000_000 for segment in new)


def test_what_killed_processes_have_left_is_removed_or_written_over(
    folder: AnyPath, tmp_path: Path
) -> None:
    """At the next start, once nobody is about to rename it; a copy is made again."""
    source = tmp_path / "made.parquet"
    source.write_bytes(b"whole")
    folder.mkdir()
    for name in (".batchmill.json.1f.tmp", ".a.parquet.tmp", ".a.parquet.part", "c.tmp"):
        write_whole(folder / name, b"part")
    copy_file(source, folder / "a.parquet")
    assert (folder / "a.parquet").read_bytes() == b"whole"
    with pytest.raises(FileNotFoundError):
        copy_file(tmp_path / "missing", folder / "b.parquet")

    remove_stale_temporaries(folder)
    left = {entry.path.name for entry in entries_in(folder)}
    assert left - {".a.parquet.tmp", ".a.parquet.part"} == {
        *(".batchmill.json.1f.tmp", "a.parquet", "c.tmp"),
    }
    assert len(left) == 4, "one of the copy's own names was written over"

    later_s = time.time() + 90
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(time, "time", lambda: later_s)
        remove_stale_temporaries(folder)
    left = {entry.path.name for entry in entries_in(folder)}
    assert left - {".a.parquet.part"} == {"a.parquet", "c.tmp"}
    remove_stale_temporaries(folder / "missing")


@pytest.mark.system
def test_books_stay_small_through_the_jvm(tmp_path: Path, spark: SparkSession) -> None:
    """As local ones: what is done and gone from the spool is left out from time to time."""
    folder = HadoopPath(f"file:{tmp_path}", lambda: spark)
    books = Books(folder, Account())
    books.open()
    sizes = []
    for number in range(30):
        names = [f"hdfs://namenode/spool/Span/{number:020}-{at}.parquet" for at in range(400)]
        books.begin(Plan(number, 1.0, 8, tuple(names)))
        books.finish(number)
        books.forget(names)
        sizes.append((tmp_path / NAME).stat().st_size)
    assert sizes != sorted(sizes)
    assert max(sizes) < 300_000
    assert {path.name for path in tmp_path.iterdir()} == {NAME, f".{NAME}.crc"}
    account = read_account(folder)
    assert account is not None
    assert (account.done, account.segments) == (29, 12_000)


def test_the_default_host_is_filled_in(spark: SparkSession, hdfs: Hdfs, tmp_path: Path) -> None:
    """Then a segment has one name, however the user wrote that of its spool."""
    root = hdfs.new_folder()
    inner = root.removeprefix(hdfs.url)
    conf = spark.sparkContext._jsc.hadoopConfiguration()
    before = conf.get("fs.defaultFS")
    conf.set("fs.defaultFS", hdfs.url)
    try:
        path = HadoopPath(f"hdfs://{inner}/spool", lambda: spark)
        assert str(path.resolve()) == f"{root}/spool"
        copy_file(write_segment(tmp_path, "Endpoint", []), path / "Endpoint" / "0.parquet")
    finally:
        conf.set("fs.defaultFS", before)
    assert names_in(spark, root) == ["spool/Endpoint/0.parquet"]
