"""The fenced blocks of the documentation: what each is, and what was said about it in a comment.

A comment that stands directly above a block tells what to do with it:

    <!-- not run: why -->      it cannot run here, and why
    <!-- file: name -->        it is also a file, which blocks after it may use
    <!-- exits: 0 or 1 -->     its command ends with one of these codes
    <!-- meanwhile: step -->   before it something happens that a reader's machine does by itself
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field
from pathlib import Path

from tests.kit.files import ROOT

DOCS = ROOT / "docs"
PAGES = (ROOT / "README.md", *sorted(DOCS.glob("*.md")))

DRAWING = "text"
OUTPUT = "output"
NOT_RUN = "not run"
NOTES = (NOT_RUN, "file", "exits", "meanwhile")

_FENCE = re.compile(r"^```(.*)$")
_COMMENT = re.compile(r"^<!-- ([a-z ]+): (.+) -->$")


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    page: Path
    line: int
    """Of its first line, from 1."""
    language: str
    text: str
    notes: dict[str, str] = field(default_factory=dict)
    """What the comments above it say."""

    @property
    def place(self) -> str:
        """Where to look."""
        return f"{self.page.name}:{self.line}"

    @property
    def runs(self) -> bool:
        """Whether it is to be run, or read by what it is for."""
        return NOT_RUN not in self.notes


def blocks(page: Path) -> list[Block]:
    """Every fenced block of a page, in order."""
    page_blocks: list[Block] = []
    notes: dict[str, str] = {}
    inside: list[str] | None = None
    language, start = "", 0
    for number, line in enumerate(page.read_text("utf-8").splitlines(), start=1):
        fence = _FENCE.match(line)
        if inside is not None:
            if fence:
                text = "".join(f"{code_line}\n" for code_line in inside)
                page_blocks.append(Block(page, start, language, text, notes))
                inside, notes = None, {}
            else:
                inside.append(line)
        elif fence:
            inside, language, start = [], fence[1].strip(), number + 1
        elif comment := _COMMENT.match(line):
            notes = {**notes, comment[1]: comment[2]}
        elif line.strip():
            notes = {}
    assert inside is None, f"{page.name}: the block at line {start} does not end"
    return page_blocks


def metric_examples(page: Path) -> list[tuple[Block, Block]]:
    """Metrics of a page, each block with the one after it that shows what they come to."""
    page_blocks = blocks(page)
    return [
        (script, shown)
        for script, shown in itertools.pairwise(page_blocks)
        if (script.language, shown.language) == ("oal", OUTPUT) and script.runs
    ]


def matches(shown: str, printed: str) -> bool:
    """Whether that was printed; an ellipsis, …, and the spaces around it stand for anything."""
    pattern = "\n".join(
        ".*".join(re.escape(part) for part in re.split(" *… *", line.rstrip()))
        for line in shown.rstrip().splitlines()
    )
    output = "\n".join(line.rstrip() for line in printed.rstrip().splitlines())
    return re.fullmatch(pattern, output) is not None


def tables(page: Path, heading: str) -> list[dict[str, str]]:
    """The rows of every table under a heading, up to the next one as high or higher; by column."""
    rows: list[dict[str, str]] = []
    columns: list[str] | None = None
    depth = 0
    for line in page.read_text("utf-8").splitlines():
        if title := re.match(r"^(#+) (.*)$", line):
            if depth and len(title[1]) <= depth:
                break
            depth = len(title[1]) if title[2] == heading else depth
        if not (depth and line.startswith("|")):
            columns = None
            continue
        cells = [part.strip() for part in re.split(r"(?<!\\)\|", line)[1:-1]]
        if columns is None:
            columns = cells
        elif set(line) - set("|-: "):
            rows.append(dict(zip(columns, cells, strict=True)))
    assert depth, f"{page.name} has no heading {heading!r}"
    return rows


def code_in(cell: str) -> list[str]:
    """What stands in backticks."""
    return re.findall(r"`([^`]+)`", cell)
