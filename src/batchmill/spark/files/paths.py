"""Files and folders by their paths: of this machine, or of any file system that Hadoop can open.

A local path is a :class:`pathlib.Path`. One with a scheme (``hdfs://``, ``s3a://``, ``abfss://``)
is a :class:`HadoopPath`, which has those of its methods that a pipeline uses, on Hadoop's file
systems in the JVM of the Spark session: no public API of PySpark can list, rename or delete a file.
Only the driver has that JVM; see :mod:`batchmill.spark.files.remote` for the executors.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import time
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from batchmill import files
from batchmill.errors import ConfigError
from batchmill.files import copy_whole, fill_whole
from batchmill.spark.errors import PipelineError
from batchmill.spark.input.choice import Segment
from batchmill.spark.input.segments import local_path, spark_path
from batchmill.spool import rows_in

_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(//[^/]*)?(/.*)?", re.DOTALL)
_PLAIN = re.compile(r"[A-Za-z0-9_.:/=-]+")
"""A URI with no character that has to be encoded."""
_ONE_PUT = frozenset({"s3a", "s3", "s3n", "gs", "oss", "cosn", "obs"})
"""Object stores: a file is there, as a whole, once it is closed, and a rename is a copy."""
_MODULES = {"s3a": "hadoop-aws", "abfs": "hadoop-azure", "abfss": "hadoop-azure"}
"""The modules of Hadoop that PySpark does not have, by scheme."""
_ERRORS = {
    "java.io.FileNotFoundException": errno.ENOENT,
    "java.nio.file.AccessDeniedException": errno.EACCES,
    "org.apache.hadoop.fs.FileAlreadyExistsException": errno.EEXIST,
    "org.apache.hadoop.fs.ParentNotDirectoryException": errno.ENOTDIR,
    "org.apache.hadoop.security.AccessControlException": errno.EACCES,
}
_MODE = 0o644


class HadoopPath:
    """A file or folder of a file system that Hadoop can open.

    Methods that :class:`pathlib.Path` has do the same, and raise the same errors.
    """

    def __init__(self, uri: str, session: Callable[[], SparkSession]) -> None:
        """``session`` gives the session through whose JVM the file system is reached."""
        match = _URI.fullmatch(uri)
        if match is None or not match[3]:
            raise ConfigError("folder", uri, "a path, or a URI such as hdfs://namenode/folder")
        self.scheme = match[1]
        self._root = f"{match[1]}:{match[2] or ''}"
        self._path = PurePosixPath(match[3])
        self._session = session

    def __str__(self) -> str:
        return f"{self._root}{self._path}"

    def __repr__(self) -> str:
        return f"HadoopPath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HadoopPath) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __truediv__(self, name: str) -> HadoopPath:
        return HadoopPath(f"{self._root}{self._path / name}", self._session)

    @property
    def name(self) -> str:
        """Its last part."""
        return self._path.name

    @property
    def parent(self) -> HadoopPath:
        """The folder it lies in."""
        return HadoopPath(f"{self._root}{self._path.parent}", self._session)

    @property
    def parents(self) -> list[HadoopPath]:
        """The folders it lies in, the next one first."""
        return [HadoopPath(f"{self._root}{path}", self._session) for path in self._path.parents]

    def with_name(self, name: str) -> HadoopPath:
        """Beside it."""
        return self.parent / name

    def resolve(self) -> HadoopPath:
        """The same with the host that the session's settings name, as Spark names its files."""
        with self._errors():
            return HadoopPath(str(self._system().makeQualified(self._java())), self._session)

    def as_uri(self) -> str:
        """The same with special characters encoded."""
        text = str(self)
        return text if _PLAIN.fullmatch(text) else str(self._java().toUri().toString())

    def exists(self) -> bool:
        """Whether it is there."""
        with self._errors():
            return bool(self._system().exists(self._java()))

    def is_dir(self) -> bool:
        """Whether it is there, and a folder."""
        try:
            with self._errors():
                return bool(self._system().getFileStatus(self._java()).isDirectory())
        except FileNotFoundError:
            return False

    def size(self) -> int:
        """How many bytes the file has."""
        with self._errors():
            return int(self._system().getFileStatus(self._java()).getLen())

    def iterdir(self) -> list[HadoopPath]:
        """What lies in the folder."""
        with self._errors():
            return [path for path, _ in self._listed()]

    def entries(self) -> list[Entry]:
        """The same, with what the file system says of each."""
        with self._errors():
            return [
                Entry(
                    path,
                    bool(status.isDirectory()),
                    int(status.getLen()),
                    status.getModificationTime() / 1000,
                )
                for path, status in self._listed()
            ]

    def mkdir(self, *, parents: bool = True, exist_ok: bool = True) -> None:
        """Make the folder and those above it."""
        with self._errors():
            self._system().mkdirs(self._java())

    def read_bytes(self) -> bytes:
        """The content."""
        with self._errors():
            stream = self._system().open(self._java())
            try:
                return bytes(stream.readAllBytes())
            finally:
                stream.close()

    def unlink(self) -> None:
        """Remove the file."""
        with self._errors():
            if not self._system().delete(self._java(), False):
                raise FileNotFoundError(errno.ENOENT, "it is not there", str(self))

    def segments(self) -> Iterator[tuple[str, Any]]:
        """The files below the folder that are segments: their names, and Hadoop's ``FileStatus``.

        A folder that is not there has none.
        """
        start = len(str(self)) + 1
        with contextlib.suppress(FileNotFoundError), self._errors():
            files = self._system().listFiles(self._java(), True)
            while files.hasNext():
                status = files.next()
                path = str(status.getPath())
                inner = path[start:].split("/")
                if path.endswith(".parquet") and not any(part[:1] in "._" for part in inner):
                    yield path, status

    def write(self, data: bytes) -> None:
        """Put a content in its place, durably: readers see the old one or the new one."""
        with self._errors():
            if self.scheme in _ONE_PUT:
                self._create(self, data)
                return
            # One process writes a file: what a killed one has left is overwritten.
            hidden = self.with_name(f".{self.name}.tmp")
            self._create(hidden, data)
            jvm, gateway = self._jvm(), self._gateway()
            kind = getattr(jvm.org.apache.hadoop.fs, "Options$Rename")
            options = gateway.new_array(kind, 1)
            options[0] = kind.OVERWRITE
            context = jvm.org.apache.hadoop.fs.FileContext.getFileContext(
                self._java().toUri(), self._conf()
            )
            context.rename(hidden._java(), self._java(), options)

    def create(self, data: bytes) -> bool:
        """Create it with a content, durably; False if it is there already.

        An object store may let two of several processes do so at once: then the last one counts.
        """
        with self._errors():
            if self.exists():
                return False
            if self.scheme in _ONE_PUT:
                self._create(self, data)
                return True
            # Several processes may do so at once.
            hidden = self.with_name(f".{self.name}.{uuid.uuid4().hex}.tmp")
            self._create(hidden, data)
            if self._system().rename(hidden._java(), self._java()):
                return True
            self._system().delete(hidden._java(), False)
            return False

    def remove_tree(self) -> None:
        """Remove it with all that is in it; nothing happens if it is not there."""
        with self._errors():
            self._system().delete(self._java(), True)

    def copy_here(self, source: AnyPath) -> None:
        """Copy a file to here; a part of it is never to be seen."""
        if self.scheme in _ONE_PUT:
            with self._errors():
                _copy(source, self, self)
            return
        # As in write().
        hidden = self.with_name(f".{self.name}.tmp")
        try:
            with self._errors():
                _copy(source, hidden, self)
                self._system().delete(self._java(), False)
                self._system().rename(hidden._java(), self._java())
        except OSError:
            remove_tree(hidden)
            raise

    def _listed(self) -> Iterator[tuple[HadoopPath, Any]]:
        for status in self._system().listStatus(self._java()):
            yield self / str(status.getPath().getName()), status

    def _create(self, path: HadoopPath, data: bytes) -> None:
        stream = self._system().create(path._java(), True)
        try:
            stream.write(data)
            if self.scheme not in _ONE_PUT:
                stream.hsync()
        finally:
            stream.close()

    def _gateway(self) -> Any:
        return self._session().sparkContext._gateway

    def _jvm(self) -> Any:
        return self._gateway().jvm

    def _conf(self) -> Any:
        return self._session().sparkContext._jsc.hadoopConfiguration()

    def _java(self) -> Any:
        return self._jvm().org.apache.hadoop.fs.Path(str(self))

    def _system(self) -> Any:
        return self._java().getFileSystem(self._conf())

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise what :class:`pathlib.Path` raises, in place of what the JVM says."""
        try:
            yield
        except (Py4JJavaError, PySparkException) as error:
            own = getattr(error, "java_exception", None) or getattr(error, "_origin", None)
            kind = "" if own is None else str(own.getClass().getName())
            said = str(error if own is None else own.getMessage()).partition("\n")[0]
            if "ClassNotFoundException" in said or kind.endswith("UnsupportedFileSystemException"):
                raise PipelineError(self._missing(said)) from error
            raise OSError(_ERRORS.get(kind, errno.EIO), f"{kind}: {said}", str(self)) from error
        except Py4JError as error:
            raise OSError(errno.EIO, str(error).partition("\n")[0], str(self)) from error

    def _missing(self, said: str) -> str:
        """What to do where Spark has no file system for the scheme."""
        version = self._jvm().org.apache.hadoop.util.VersionInfo.getVersion()
        module = _MODULES.get(self.scheme)
        advice = f"Spark needs a jar with the file system for {self.scheme}: (spark.jars.packages)"
        if module is not None:
            package = f"org.apache.hadoop:{module}:{version}"
            advice = f"start with --conf spark.jars.packages={package}"
        elif self.scheme in ("s3", "s3n"):
            advice = "write s3a:// instead"
        return f"{self} cannot be opened ({said}): {advice}"


AnyPath: TypeAlias = Path | HadoopPath


@dataclass(frozen=True)
class Entry:
    """What lies in a folder."""

    path: AnyPath
    is_dir: bool
    size: int
    mtime: float
    """When it was changed, in seconds since 1970; of a folder not every file system knows it."""


def parse_path(path: str | Path, session: Callable[[], SparkSession]) -> AnyPath:
    """The path that a user has given: local, or with a scheme. A local one is absolute."""
    if isinstance(path, str) and (match := _URI.fullmatch(path)) is not None:
        if match[1] != "file":
            return HadoopPath(path, session)
        path = urllib.request.url2pathname(urllib.parse.urlsplit(path).path)
    return Path(path).resolve()


def file_at(name: str, spark: SparkSession | None) -> AnyPath:
    """The file that Spark, or the books, name so."""
    local = local_path(name)
    if local is not None:
        return Path(local)
    assert spark is not None, name
    return HadoopPath(name, lambda: spark)


def is_uri(name: str) -> bool:
    """Whether this is the name of a file that is not on this machine."""
    match = _URI.fullmatch(name)
    return match is not None and match[1] != "file"


def local_only(*paths: AnyPath) -> list[Path]:
    """Those that are on this machine."""
    return [path for path in paths if isinstance(path, Path)]


def check_apart(*folders: AnyPath) -> None:
    """Raise unless no folder lies in another one: each is listed or cleaned as a whole."""
    for folder in folders:
        for other in folders:
            if folder is not other and (folder == other or other in folder.parents):
                raise ConfigError("folder", str(folder), f"outside {other}")


def write_whole(path: AnyPath, data: bytes, *, durable: bool = True) -> None:
    """Put ``data`` in the place of ``path``: readers see the old content or the new one."""
    if isinstance(path, Path):
        files.write_whole(path, data, durable=durable, mode=_MODE)
    else:
        path.write(data)


def create_whole(path: AnyPath, data: bytes) -> bool:
    """Create ``path`` durably with ``data``; False if it exists, and then it stays as it is."""
    if isinstance(path, Path):
        return files.create_whole(path, data, mode=_MODE)
    return path.create(data)


def append(path: AnyPath, size: int, data: bytes) -> None:
    """Add ``data`` to the first ``size`` bytes of a file, durably."""
    if isinstance(path, Path):
        with path.open("r+b") as stream:
            stream.seek(size)
            # After an error, part of what was to be added may be there.
            stream.truncate()
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
    else:  # not every file system can append
        path.write(path.read_bytes()[:size] + data)


def remove_tree(path: AnyPath) -> None:
    """Remove a file, or a folder with all that is in it, as far as that is possible now."""
    if isinstance(path, Path):
        shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):
            path.unlink()
    else:
        with contextlib.suppress(OSError):
            path.remove_tree()


def entries_in(folder: AnyPath) -> list[Entry]:
    """What lies in a folder; nothing if it is not there."""
    try:
        if isinstance(folder, HadoopPath):
            return folder.entries()
        listing = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    entries = []
    for entry in listing:
        with contextlib.suppress(FileNotFoundError):  # gone since
            stat = entry.stat()
            entries.append(Entry(Path(entry.path), entry.is_dir(), stat.st_size, stat.st_mtime))
    return entries


def remove_stale_temporaries(folder: AnyPath) -> None:
    """Remove what processes that were killed while they wrote have left in a folder."""
    if isinstance(folder, Path):
        files.remove_stale_temporaries(folder)
        return
    with contextlib.suppress(OSError):
        for entry in folder.entries():
            name = entry.path.name
            is_stale = time.time() - entry.mtime > files.STALE_S
            if name.startswith(".") and name.endswith(".tmp") and is_stale:
                entry.path.unlink()


def copy_file(source: AnyPath, target: AnyPath) -> None:
    """Copy a file durably, as a whole or not at all."""
    if isinstance(target, HadoopPath):
        target.copy_here(source)
        return
    if isinstance(source, Path):
        copy_whole(source, target)
        return

    def fill(part: Path) -> None:
        with source._errors():
            _copy(source, part, source)

    fill_whole(target, fill)


def segments_in(folder: AnyPath, known: Collection[str] = ()) -> tuple[set[str], list[Segment]]:
    """The names of all segments in a folder, and more about those that are not ``known``.

    At any depth, but no name that begins with ``.`` or ``_``.
    """
    if isinstance(folder, HadoopPath):
        names, new = set(), []
        for name, status in folder.segments():
            names.add(name)
            if name not in known:
                modified = status.getModificationTime() / 1000
                size = status.getLen()
                new.append(Segment(modified, name, size, rows_in(name, size)))
        return names, new
    names = set(_local_segments(folder))
    new = []
    for name in names.difference(known):
        with contextlib.suppress(FileNotFoundError):
            stat = os.stat(name)  # noqa: PTH116 - called for every segment
            size = stat.st_size
            new.append(Segment(stat.st_mtime, name, size, rows_in(name, size)))
    return names, new


def is_empty(folder: AnyPath) -> bool:
    """Whether nothing is in a folder, or it does not exist: it may not be mounted."""
    try:
        return next(iter(folder.iterdir()), None) is None
    except FileNotFoundError:
        return True


def _local_segments(folder: Path | str) -> Iterator[str]:
    try:
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        if entry.name.startswith((".", "_")):
            continue
        if entry.is_dir():
            yield from _local_segments(entry.path)
        elif entry.name.endswith(".parquet"):
            yield entry.path


def _copy(source: AnyPath, target: AnyPath, through: HadoopPath) -> None:
    """Copy a file between any two file systems, in the JVM."""
    jvm, conf = through._jvm(), through._conf()

    def opened(path: AnyPath) -> tuple[Any, Any]:
        if isinstance(path, HadoopPath):
            return path._system(), path._java()
        local = jvm.org.apache.hadoop.fs.FileSystem.getLocal(conf).getRaw()
        return local, jvm.org.apache.hadoop.fs.Path(spark_path(path))

    jvm.org.apache.hadoop.fs.FileUtil.copy(*opened(source), *opened(target), False, True, conf)
