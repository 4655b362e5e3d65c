"""What users install: the wheel, alone on a Python without a single third-party package."""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from email.message import Message
from pathlib import Path

import pytest

from tests.kit.files import ROOT
from tests.kit.threads import PATIENCE_S

LOCKS = sorted((ROOT / "requirements").glob("*.lock"))

# Imports every module that must do without third-party packages, then prints what came in with them
# and is neither batchmill nor of the standard library. Of spark that is the package itself; what
# lies in it needs pyspark.
IMPORT_THE_CORE = """
import sys
before = set(sys.modules)
import importlib, pkgutil
import batchmill
import batchmill.spark
for name in ("queue", "pressure", "batcher", "flows", "sources", "oal", "store"):
    package = importlib.import_module(f"batchmill.{name}")
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(loaded - sys.stdlib_module_names - {"batchmill"}))
"""

PRODUCE_ONE_ITEM = """
from batchmill import BatchQueue, BatchQueueSettings, ThreadPolicy
consumed = []
config = BatchQueueSettings(threads=ThreadPolicy.fixed(1), consumer=consumed.extend)
with BatchQueue("packaging", config) as queue:
    accepted = queue.produce("an item")
    flushed = queue.flush(30)
print(accepted, flushed, consumed)
"""

# Each uses a part of batchmill whose extra is missing.
WITHOUT_EXTRA = {
    "spool": """
from batchmill.sources import builtin_catalog
next(iter(builtin_catalog().sources.values())).arrow_schema()
""",
    "aggregate": """
import batchmill, batchmill.aggregate, batchmill.spans, batchmill.traces, batchmill.workers
for package, name in (
    (batchmill.aggregate, "Aggregator"),
    (batchmill.spans, "link"),
    (batchmill.traces, "SpanReader"),
    (batchmill.workers, "Committer"),
):
    try:
        getattr(package, name)
    except batchmill.MissingExtraError as error:
        assert error.extra == "aggregate"
    else:
        raise AssertionError(name)
batchmill.Embedded
""",
    "postgres": """
from batchmill.store import open_store
open_store("postgresql://nobody@127.0.0.1:1/nothing")
""",
    "otlp": """
import batchmill.ingest
for name in batchmill.ingest.__all__:
    getattr(batchmill.ingest, name)
""",
    "kafka": """
import batchmill.kafka
for name in batchmill.kafka.__all__:
    getattr(batchmill.kafka, name)
""",
    "export": """
import batchmill.export
for name in batchmill.export.__all__:
    getattr(batchmill.export, name)
""",
    "web": """
import batchmill.web
for name in batchmill.web.__all__:
    getattr(batchmill.web, name)
""",
    "prometheus": """
from batchmill.telemetry import PrometheusCollector
""",
    "otel": """
from batchmill.telemetry import observe
""",
    "spark": """
import batchmill.spark
for name in batchmill.spark.__all__:
    getattr(batchmill.spark, name)
""",
}

RUN_THE_COMMAND = """
import sys
from batchmill.cli import main
sys.exit(main())
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from this tree."""
    return build(ROOT, "wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    """The wheel's METADATA."""
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))


@pytest.fixture(scope="module")
def bare_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that has the wheel, and no other package at all: not even pip."""
    home = tmp_path_factory.mktemp("bare")
    venv.EnvBuilder(with_pip=False, symlinks=os.name != "nt").create(home)
    python = home / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    where = run(python, "-I", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
    # To install a wheel of pure Python without pip is to unpack it.
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(where.stdout.strip())
    return python


def test_import_brings_in_no_third_party_module(bare_python: Path) -> None:
    """Importing batchmill and all of its core loads the standard library only."""
    assert run(bare_python, "-I", "-c", IMPORT_THE_CORE).stdout.split() == []


def test_queue_works_without_any_other_package(bare_python: Path) -> None:
    """A queue takes and consumes an item where nothing but the wheel is installed."""
    assert run(bare_python, "-I", "-c", PRODUCE_ONE_ITEM).stdout == "True True ['an item']\n"


def test_command_names_the_extra_it_misses(bare_python: Path) -> None:
    """Without rich, `batchmill top` fails and says which extra to install."""
    answer = subprocess.run(
        [bare_python, "-I", "-c", RUN_THE_COMMAND, "top"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert answer.returncode != 0
    assert "batchmill[cli]" in answer.stderr
    assert "Traceback" not in answer.stderr


@pytest.mark.parametrize("extra", WITHOUT_EXTRA)
def test_part_names_the_extra_it_misses(bare_python: Path, extra: str) -> None:
    """Using a part of batchmill whose extra is not installed fails, and says which one it is."""
    answer = subprocess.run(
        [bare_python, "-I", "-c", WITHOUT_EXTRA[extra]],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert answer.returncode != 0
    assert f"batchmill[{extra}]" in answer.stderr.splitlines()[-1]


def test_version_is_the_one_declared(bare_python: Path, metadata: Message) -> None:
    """`batchmill.__version__` is the version the wheel was built as."""
    answer = run(bare_python, "-I", "-c", "import batchmill; print(batchmill.__version__)")
    assert answer.stdout.strip() == metadata["Version"]


def test_core_depends_on_nothing(metadata: Message) -> None:
    """Every dependency the wheel declares sits behind an extra."""
    required = metadata.get_all("Requires-Dist", [])
    assert [line for line in required if "extra ==" not in line] == []


def test_extras_are_the_documented_ones(metadata: Message) -> None:
    """The wheel offers one extra for each part beyond the core, and `all`."""
    parts = {"cli", "spool", "aggregate", "otlp", "demo", "jre", "spark", "postgres", "kafka"}
    parts |= {"alerts", "export", "web", "prometheus", "otel", "iceberg"}
    assert set(metadata.get_all("Provides-Extra", [])) == parts | {"all"}


def test_wheel_is_typed(wheel: Path) -> None:
    """Type checkers find py.typed in the wheel."""
    assert "batchmill/py.typed" in names(wheel)


@pytest.mark.parametrize(
    "file",
    [
        "alerts/demo.toml",
        *("oal/core.oal", "sources/catalog.json", "spark/log4j2.properties"),
        *("web/static/index.html", "web/static/js/main.js", "web/static/vendor/uplot/LICENSE"),
    ],
)
def test_wheel_carries_the_data(wheel: Path, file: str) -> None:
    """The files that batchmill reads at run time are in the wheel."""
    assert f"batchmill/{file}" in names(wheel)


def test_wheel_carries_the_licence(wheel: Path) -> None:
    """The wheel brings the text of its licence."""
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names(wheel))


def test_wheel_holds_the_package_only(wheel: Path) -> None:
    """No tests, benchmarks or examples end up in a user's site-packages."""
    tops = {name.partition("/")[0] for name in names(wheel)}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"batchmill"}


@pytest.mark.system
def test_sdist_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    """A wheel built from the sdist holds the same files as one built from the tree."""
    sdist = build(ROOT, "sdist", tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        # The first releases of 3.11 have no filters, and do not miss one.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(tmp_path / "tree")
    [tree] = (tmp_path / "tree").iterdir()
    assert names(build(tree, "wheel", tmp_path / "wheel")) == names(wheel)


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_lock_names_no_place(lock: Path) -> None:
    """A lock file works anywhere: it names no registry, address or path."""
    places = re.compile(r"://|file:|^\s*-(?!-hash=)|(?:^|\s)[~.]?/", re.MULTILINE)
    assert places.findall(lock.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_locks_agree(lock: Path) -> None:
    """One environment can hold all lock files at once: each is a part of dev.lock.

    Only the oldest PySpark is installed elsewhere.
    """
    if lock.name == "oldest.lock":
        (oldest,) = pins(lock)
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        (allowed,) = re.findall(
            r"pyspark>=([\d.]+)", " ".join(extras["optional-dependencies"]["spark"])
        )
        assert oldest == f"pyspark=={allowed}.0"
        return
    assert pins(lock) <= pins(ROOT / "requirements" / "dev.lock")


def pins(lock: Path) -> set[str]:
    """The exact versions a lock file pins."""
    return set(re.findall(r"^[\w.\[\]-]+==[^\s;]+", lock.read_text(encoding="utf-8"), re.MULTILINE))


def build(tree: Path, target: str, into: Path) -> Path:
    """Build one target of the project with its own build backend."""
    into.mkdir(exist_ok=True)
    run(sys.executable, "-m", "hatchling", "build", "-t", target, "-d", into, cwd=tree)
    [built] = into.iterdir()
    return built


def names(wheel: Path) -> set[str]:
    """The files in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def run(*command: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command that must succeed; where it does not, the failure shows what it said."""
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, f"{command} said:\n{done.stdout}{done.stderr}"
    return done
