"""Real file systems that are not local: an HDFS, and an S3 endpoint (moto's server).

The fixture ``hdfs`` is a NameNode and a DataNode on the loopback, in processes and a folder of
their own; ``s3`` is a bucket, with the settings that Spark needs for it. All tests of a run share
them: use a folder of your own (:meth:`Hdfs.new_folder`).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import urllib.request
import uuid
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Self
from xml.etree import ElementTree

import pytest

from tests.kit.jvm import QUICK, cache_folder, jars, jars_missing, java_missing
from tests.kit.processes import Life, free_port, free_ports
from tests.kit.threads import PATIENCE_S, until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_NAMENODE = "org.apache.hadoop.hdfs.server.namenode.NameNode"
_DATANODE = "org.apache.hadoop.hdfs.server.datanode.DataNode"
_MOTO = ("moto[s3]==5.2.5", "flask==3.1.3", "flask-cors==6.0.5")
_INSTALL_S = 600
_STATE = "jmx?qry=Hadoop:service=NameNode,name=FSNamesystemState"


class Hdfs:
    """An HDFS of one DataNode; as a context manager it runs, and is gone afterwards."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="batchmill-hdfs-"))
        self._port, self._page, *data = free_ports(5)
        places = ("address", "http.address", "ipc.address")
        settings = {
            "fs.defaultFS": self.url,
            "dfs.replication": "1",
            "dfs.permissions.enabled": "false",
            "dfs.namenode.name.dir": str(self._folder / "name"),
            "dfs.namenode.http-address": f"127.0.0.1:{self._page}",
            "dfs.namenode.safemode.extension": "0",
            "dfs.namenode.datanode.registration.ip-hostname-check": "false",
            "dfs.datanode.data.dir": str(self._folder / "data"),
            "dfs.datanode.hostname": "127.0.0.1",
            **{
                f"dfs.datanode.{place}": f"127.0.0.1:{port}"
                for place, port in zip(places, data, strict=True)
            },
        }
        properties = "".join(
            f"<property><name>{name}</name><value>{value}</value></property>"
            for name, value in settings.items()
        )
        for name in ("core-site.xml", "hdfs-site.xml"):
            (self._folder / name).write_text(f"<configuration>{properties}</configuration>")
        self._lives: list[Life] = []

    @property
    def url(self) -> str:
        """Its root."""
        return f"hdfs://127.0.0.1:{self._port}"

    def new_folder(self) -> str:
        """The URI of a folder that no other test has; it does not exist yet."""
        return f"{self.url}/{uuid.uuid4().hex[:12]}"

    def __enter__(self) -> Self:
        try:
            subprocess.run(
                [*self._java(_NAMENODE), "-format", "-nonInteractive"],
                capture_output=True,
                timeout=PATIENCE_S,
                check=True,
            )
            for name, kind in (("namenode", _NAMENODE), ("datanode", _DATANODE)):
                self._lives.append(Life(self._java(kind), self._folder / f"{name}.log"))
            until(self._answers, lambda: "\n".join(life.report() for life in self._lives))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End it and remove its folder."""
        for life in self._lives:
            life.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _answers(self) -> bool:
        """Whether files can be written."""
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self._page}/{_STATE}", timeout=5
            ) as page:
                (state,) = json.load(page)["beans"]
                return bool(state["NumLiveDataNodes"] and state["FSState"] == "Operational")
        except (OSError, ValueError):
            return False

    def _java(self, kind: str) -> list[str]:
        home = os.environ.get("JAVA_HOME")
        program = str(Path(home, "bin", "java")) if home else "java"
        classpath = os.pathsep.join([str(self._folder), *map(str, jars("hdfs"))])
        quiet = "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"
        return [program, *QUICK, "-Xmx256m", quiet, "-cp", classpath, kind]


def upload(spark: SparkSession, folder: Path, uri: str) -> None:
    """Copy a folder of segments to an HDFS, the oldest first; they keep that order."""
    from batchmill.spark.files.paths import HadoopPath, copy_file

    root = HadoopPath(uri, lambda: spark)
    for file in sorted(folder.rglob("*.parquet"), key=lambda file: file.stat().st_mtime_ns):
        copy_file(file, root / str(file.relative_to(folder)))


def names_in(spark: SparkSession, uri: str) -> list[str]:
    """The files below a folder, without its name, in order."""
    from batchmill.spark.files.paths import HadoopPath

    root = HadoopPath(uri, lambda: spark)
    if not root.is_dir():
        return []
    files = root._system().listFiles(root._java(), True)
    names = []
    while files.hasNext():
        names.append(str(files.next().getPath()).removeprefix(f"{uri}/"))
    return sorted(names)


class Bucket:
    """A bucket of an S3 endpoint."""

    def __init__(self, port: int) -> None:
        self._endpoint = f"http://127.0.0.1:{port}"
        self._bucket = f"{self._endpoint}/bucket-{uuid.uuid4().hex[:12]}"
        self.url = f"s3a://{self._bucket.rpartition('/')[2]}"
        self._request("PUT", "")

    def upload(self, folder: Path, key: str) -> None:
        """Add the segments below a folder, as objects whose names begin with ``key``."""
        for file in sorted(folder.rglob("*.parquet")):
            self._request("PUT", f"/{key}/{file.relative_to(folder)}", file.read_bytes())

    def names(self, key: str) -> list[str]:
        """The files below a folder, without its name, in order."""
        listing = ElementTree.fromstring(self._request("GET", f"?list-type=2&prefix={key}/"))
        keys = [element.text or "" for element in listing.iter() if element.tag.endswith("}Key")]
        # A name that ends with "/" is an empty folder.
        return sorted(name.removeprefix(f"{key}/") for name in keys if not name.endswith("/"))

    def _request(self, method: str, path: str, data: bytes | None = None) -> bytes:
        request = urllib.request.Request(self._bucket + path, data, method=method)
        request.add_header("Content-Type", "application/octet-stream")
        request.add_header("Authorization", "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/x")
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            content: bytes = answer.read()
            return content

    @property
    def conf(self) -> dict[str, str]:
        """What a Spark session needs to open it."""
        settings = {
            "endpoint": self._endpoint,
            "endpoint.region": "us-east-1",
            "access.key": "anybody",
            "secret.key": "anything",
            "path.style.access": "true",
        }
        return {
            "spark.jars": ",".join(map(str, jars("s3"))),
            **{f"spark.hadoop.fs.s3a.{name}": value for name, value in settings.items()},
        }


@pytest.fixture(scope="session")
def hdfs() -> Iterator[Hdfs]:
    """The one HDFS of a test run."""
    _need("hdfs")
    with Hdfs() as server:
        yield server


@pytest.fixture(scope="session")
def s3() -> Iterator[Bucket]:
    """The one S3 endpoint of a test run, with a bucket."""
    _need("s3")
    try:
        python = _moto()
    except (OSError, subprocess.SubprocessError) as error:
        _give_up(f"moto cannot be installed: {error}")
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = [python, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        with Life(command, Path(folder, "log")) as life:

            def answers() -> bool:
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/moto-api", timeout=5):
                        return True
                except OSError:
                    return False

            until(answers, life.report)
            yield Bucket(port)


def _need(profile: str) -> None:
    """Skip where there are no jars, and fail in CI."""
    missing = java_missing() or jars_missing(profile)
    if missing is not None:
        _give_up(missing)


def _give_up(why: str) -> NoReturn:
    (pytest.fail if os.environ.get("CI") else pytest.skip)(why)


def _moto() -> str:
    """A Python with moto, in an environment beside the jars: it needs older packages than ours."""
    place = cache_folder() / f"moto-{hashlib.sha256(' '.join(_MOTO).encode()).hexdigest()[:16]}"
    python = place / "bin" / "python"
    done = place / "done"
    if not done.exists():
        venv.create(place, clear=True, with_pip=True)
        subprocess.run(
            [str(python), "-m", "pip", "install", "--quiet", *_MOTO],
            capture_output=True,
            timeout=_INSTALL_S,
            check=True,
        )
        done.touch()
    return str(python)
