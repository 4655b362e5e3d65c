"""Every file in the home of a run is in a table of the documentation, which names its bound.

``tests/system/test_demo_run.py`` looks at those of a real run.
"""

from __future__ import annotations

import fnmatch
import re

from tests.kit.files import ROOT


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
