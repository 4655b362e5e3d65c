"""Every file in the home of a run is in a table of the documentation, which names its bound."""

from __future__ import annotations

import fnmatch
import os
import re
import sys
from pathlib import Path

import pytest

from batchmill.run import Home
from tests.kit.files import ROOT
from tests.kit.jvm import java_missing
from tests.kit.processes import Life

for needed in ("grpc", "opentelemetry.exporter.otlp.proto.http", "pyspark", "uvicorn"):
    pytest.importorskip(needed)

SMALL = {
    "checkpoint/batchmill.json": 1_000,
    "checkpoint/books.jsonl": 256 * 1024,
    "checkpoint/progress.json": 100_000,
    "checkpoint/outbox/outbox.json": 1_000,
    "metrics.db.*.lock": 0,
    "source.json": 1_000,
    "run/*.json": 100_000,
    "run/*.lock": 0,
}
"""The most bytes of files that stay small, whatever the traffic."""


def bounds() -> list[str]:
    """The patterns of the table on the page."""
    page = (ROOT / "docs" / "operations.md").read_text("utf-8")
    table = page.partition("## Every file has a bound\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?`) \| \S.* \|$", table, re.MULTILINE)
    return [pattern for row in rows for pattern in re.findall(r"`(.*?)`", row)]


def matches(file: str, pattern: str) -> bool:
    """Whether a path fits a pattern of the page."""
    wanted = re.sub(r"<\w+>", "*", pattern).replace("**", "*")
    return fnmatch.fnmatchcase(file, wanted) and (
        "**" in pattern or file.count("/") == pattern.count("/")
    )


def test_the_patterns_tell_files_apart() -> None:
    """A file that nobody knows fits none."""
    known = bounds()
    assert len(known) > 15
    for file in ("spool/Span/1-2-3.parquet", "log/ingest.log.1", "metrics.db", "run/web.json"):
        assert sum(matches(file, pattern) for pattern in known) == 1, file
    for file in ("core", "spool/x.parquet", "run/a/b.json", "checkpoint/spark/0", "log/x.txt"):
        assert not any(matches(file, pattern) for pattern in known), file


@pytest.mark.system
@pytest.mark.timeout(600)
def test_a_run_leaves_only_files_whose_bound_is_known(tmp_path: Path) -> None:
    """All parts run, one segment is broken, and a writer has died."""
    if (missing := java_missing()) is not None:
        pytest.skip(missing)
    home = Home(tmp_path / "home")
    home.prepare()
    (home.spool / "Span").mkdir()
    (home.spool / "Span" / "broken.parquet").write_bytes(b"broken")
    (home.spool / "Span" / ".1-2.parquet.tmp").touch()
    command = [
        *(sys.executable, "-m", "batchmill", "run", "--demo=5", f"--home={home.folder}"),
        *("--http-port=0", "--grpc-port=0", "--web-port=0"),
        *("--export-to=prometheus://127.0.0.1:0", "--export-to=otlp+grpc://127.0.0.1:9"),
    ]
    with Life(command, tmp_path / "errors", os.environ) as life:
        life.must_hear("the demo's traffic is over: .*")
        life.end(0)
    known = bounds()
    files = [
        str(path.relative_to(home.folder)) for path in home.folder.rglob("*") if path.is_file()
    ]
    unknown = [file for file in files if not any(matches(file, pattern) for pattern in known)]
    assert unknown == []
    for parts in ("spool-quarantine/Span/", "checkpoint/state/", "checkpoint/outbox/", "log/"):
        assert any(file.startswith(parts) for file in files), parts
    assert not (home.spool / "Span" / ".1-2.parquet.tmp").exists()
    for pattern, most in SMALL.items():
        own = [file for file in files if fnmatch.fnmatchcase(file, pattern)]
        assert own, pattern
        for file in own:
            assert (home.folder / file).stat().st_size <= most, file
