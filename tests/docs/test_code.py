"""Every code block of the README and of docs/ does what its page says; see tests/docs/kit.py."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import pytest

from batchmill import BatchmillError
from batchmill.oal import core_script, load
from batchmill.run import OTHER_VARIABLES
from batchmill.telemetry import default_registry
from tests.docs.kit import DOCS, PAGES, blocks
from tests.docs.reader import Reader, commands, misunderstood
from tests.kit.events import temporary_sources
from tests.kit.files import ROOT
from tests.kit.traces.segments import HOUR, kept, made_span

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ReaderOf: TypeAlias = Callable[[Path], Reader]

QUICK_START, PIPELINE, NOTEBOOK, TRACES = (
    DOCS / f"{name}.md" for name in ("index", "pipeline", "notebook", "traces")
)
"""Their blocks run pipelines, all on the Spark session that the tests share."""
PLAIN = [page for page in PAGES if page not in (QUICK_START, PIPELINE, NOTEBOOK, TRACES)]

WRONG = {
    "a language that nobody runs": "```ruby\nputs 1\n```",
    "no language at all": "```\nbatchmill run\n```",
    "code that raises": "```python\n1 / 0\n```",
    "code that prints something else": "```python\nprint(1)\n```\n\n```output\n2\n```",
    "output of nothing": "```output\n2\n```",
    "a command that is not ours": "```sh\npip install batchmill\n```",
    "a command that fails": "```sh\nbatchmill oal check missing.oal\n```",
    "a setting that there is not": '```toml\nhtp_port = "4318"\n```',
    "a metric that is wrong": "```oal\na = from(Endpoint.*).cmp();\n```",
    "JSON that is none": "```json\n{'a': 1}\n```",
    "YAML that is none": "```yaml\na: [1\n```",
    "a query that is none": "```sql\nselect 1 +;\n```",
    "a query of nothing": "```sql\nselect 1 where false;\n```",
    "a property that is none": "```properties\nsecurity.protocol SSL\n```",
    "code in a drawing": "```text\npip install batchmill\n```",
    "a note that says nothing": "<!-- never run: why -->\n```python\n1 / 0\n```",
    "a note that is not above its block": "<!-- not run: why -->\nText.\n```python\n1 / 0\n```",
}


@pytest.fixture
def own_sources() -> Iterator[None]:
    """Event types that a page defines are gone after it."""
    with temporary_sources():
        yield


@pytest.fixture
def reader(
    tmp_path: Path,
    own_sources: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[ReaderOf]:
    """Makes the reader of a page, in an empty folder and without settings from outside."""
    monkeypatch.chdir(tmp_path)
    default_registry.after_fork_in_child()  # pages show what they count themselves
    for name in [name for name in os.environ if name.startswith(("BATCHMILL_", "OTEL_"))]:
        if name not in OTHER_VARIABLES:
            monkeypatch.delenv(name)
    made: list[Reader] = []

    def make(page: Path) -> Reader:
        made.append(Reader(page, tmp_path, capsys))
        return made[-1]

    yield make
    for page_reader in made:
        page_reader.close()


@pytest.mark.parametrize("page", PLAIN, ids=lambda page: page.name)
def test_the_blocks_of_a_page_run(page: Path, reader: ReaderOf) -> None:
    """A reader can copy the blocks of a page, from top to bottom; they print what it shows."""
    reader(page).read()


def test_the_blocks_of_the_pipeline_run(spark: SparkSession, reader: ReaderOf) -> None:
    """The page of the pipeline does what it says, on the Spark session that is there."""
    reader(PIPELINE).read()


def test_the_blocks_of_the_notebook_run(spark: SparkSession, reader: ReaderOf) -> None:
    """A reader can copy its cells, from top to bottom."""
    reader(NOTEBOOK).read()


def test_the_blocks_of_traces_run(spark: SparkSession, reader: ReaderOf, tmp_path: Path) -> None:
    """DuckDB, Spark and pandas read the folder of a run, as the page says."""
    start_ms = (datetime(2026, 11, 17, 19, tzinfo=UTC).timestamp() - HOUR) * 1000

    def keep() -> None:
        old = made_span(1, 1, at_ms=start_ms - 3_600_000, http__route="/cart")
        rows = [old, made_span(2, 1, at_ms=start_ms, service="db")]
        for trace, status in enumerate(("OK", "UNSET", "ERROR"), start=3):
            took_ms = 800 if status == "ERROR" else 10
            rows.append(
                made_span(
                    *(trace, 1),
                    at_ms=start_ms,
                    took_ms=took_ms,
                    status=status,
                    http__route="/orders",
                )
            )
        kept(tmp_path / "batchmill-data", rows, now=HOUR + start_ms / 1000)

    page = reader(TRACES)
    page.steps["spans are kept"] = keep
    page.read()


def test_the_quick_start_runs(
    spark: SparkSession, reader: ReaderOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A span that the real SDK sends ends up in the answer of a query.

    `batchmill run` is played by its parts, the receiver and the pipeline, so that the Spark session
    that is there serves once more; tests/run/test_run.py runs the command itself.
    """
    from batchmill.spark import Pipeline
    from tests.kit.ingest import QUICK, ingest

    home = tmp_path / "batchmill-data"
    core = load(core_script())
    # Two of the core metrics: to plan all of them takes a while, and shows nothing more.
    script = [core[name].definition for name in ("service_resp_time", "service_percentile")]

    def commit() -> None:
        with Pipeline(
            oal=script,
            spool=home / "spool",
            store=f"sqlite:///{home / 'metrics.db'}",
            checkpoint=home / "checkpoint",
            spark=spark,
            remove_read=True,
        ) as pipeline:
            pipeline.run_available()

    with ingest(home, *QUICK) as running:
        host, port = running.http
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{host}:{port}")
        following = reader(QUICK_START)
        following.steps["the pipeline commits"] = commit
        following.read()


@pytest.mark.parametrize("text", WRONG.values(), ids=WRONG.keys())
def test_a_page_that_is_wrong_is_noticed(text: str, reader: ReaderOf, tmp_path: Path) -> None:
    """A block that cannot run and does not say so, or does not do what the page shows."""
    page = tmp_path / "page.md"
    page.write_text(f"# A page\n\n{text}\n", "utf-8")
    with pytest.raises((AssertionError, BatchmillError, ZeroDivisionError)):
        reader(page).read()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_commands_of_a_page_are_understood(page: Path) -> None:
    """The real parser takes each command that a page has, also of blocks that are not run."""
    assert [command for command in commands(page) if misunderstood(command.words)] == []


def test_a_command_that_there_is_not_is_noticed() -> None:
    """An option or a command that does not exist is told from one that does."""
    assert misunderstood(["pipeline", "--no-such-option"])
    assert misunderstood(["sources", "Endpoint"])
    assert not misunderstood(["pipeline", "--store", "…", "--once", "…"])
    assert sum(1 for page in PAGES for _ in commands(page)) > 20


def test_the_readme_example_is_ten_lines() -> None:
    """The queue's example has ten lines, not counting the import and blank lines."""
    (code,) = (block.text for block in blocks(ROOT / "README.md") if block.language == "python")
    lines = [line for line in code.splitlines() if line.strip() and "import" not in line]
    assert len(lines) <= 10


def test_every_link_of_the_readme_leads_somewhere() -> None:
    """Its links name files that exist; those of docs/ are checked as the site is built."""
    readme = ROOT / "README.md"
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", readme.read_text("utf-8"))
    assert targets
    for target in targets:
        assert (readme.parent / target).exists(), target
