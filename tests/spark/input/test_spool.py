"""A spool as an input, without Spark: which segments wait, and which are removed."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")

from batchmill.spark import PipelineSettings
from batchmill.spark.input.base import Unread
from batchmill.spark.input.books import Account, Books, Plan, read_account
from batchmill.spark.input.choice import Pace
from batchmill.spark.input.spool import SegmentRemover, SpoolInput


class Home:
    """A spool, a quarantine and the books of a stream."""

    def __init__(self, folder: Path) -> None:
        self.spool = folder / "spool"
        self.quarantine = folder / "spool-quarantine"
        self.checkpoint = folder / "checkpoint"
        self.checkpoint.mkdir(parents=True)
        self.restart()

    def restart(self) -> None:
        """Open the books as after a start."""
        self.books = Books(self.checkpoint, read_account(self.checkpoint) or Account())
        self.books.open()

    def segment(self, name: str, size: int = 10, mtime: float = 1000.0) -> Path:
        """A file of the spool."""
        path = self.spool / "Span" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * size)
        os.utime(path, (mtime, mtime))
        return path

    def plan(self, *paths: Path) -> None:
        """Plan a batch."""
        self.books.begin(Plan(self.books.next_batch, 1.0, 8, tuple(map(str, paths))))

    def run(self, *paths: Path) -> None:
        """Plan a batch, and mark it as done."""
        self.plan(*paths)
        self.books.finish(self.books.next_batch - 1)

    def source(self, **settings: Any) -> SpoolInput:
        """The spool as an input."""
        return SpoolInput(self.spool, self.books, PipelineSettings(**settings))

    def remover(self) -> SegmentRemover:
        """As after a start."""
        return SegmentRemover(self.spool, self.books, self.quarantine)

    def left(self) -> set[str]:
        """What the spool holds."""
        return {path.name for path in self.spool.rglob("*") if path.is_file()}


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """Three batches of one segment, the last one not done, and a segment that nobody has read."""
    made = Home(tmp_path / "a b%20c")
    for number in range(2):
        made.run(made.segment(f"{number} é%.parquet"))
    made.plan(made.segment("2 é%.parquet"))
    made.segment("new.parquet")
    return made


def chosen(source: SpoolInput) -> list[list[str]]:
    """The names of all batches that an input gives."""
    source.look(patient=False)
    batches = []
    while (choice := source.choose(Pace(None))) is not None:
        batches.append([Path(path).name for path in choice.segments])
    assert not source.waiting
    return batches


def test_only_what_is_done_is_removed(home: Home) -> None:
    """A batch that is not marked as done may be run again."""
    assert home.remover().remove() == 2
    assert home.left() == {"2 é%.parquet", "new.parquet"}
    home.books.finish(2)
    assert home.remover().remove() == 1
    assert home.remover().remove() == 0
    assert home.left() == {"new.parquet"}


def test_what_a_crash_leaves_over_is_removed_after_the_restart(home: Home) -> None:
    """Some were removed, and the books were not written after that."""
    (home.spool / "Span" / "0 é%.parquet").unlink()
    home.restart()
    assert home.remover().remove() == 1
    assert home.left() == {"2 é%.parquet", "new.parquet"}


def test_nothing_outside_the_spool_is_removed(home: Home, tmp_path: Path) -> None:
    """The books may be those of another spool."""
    outside = tmp_path / "outside.parquet"
    outside.touch()
    home.books.finish(2)
    home.run(outside, home.spool / "Span" / ".." / ".." / ".." / "outside.parquet")
    assert home.remover().remove() == 3
    assert outside.exists()


def test_a_segment_stays_if_the_quarantine_has_no_copy(
    home: Home, caplog: pytest.LogCaptureFixture
) -> None:
    """Its content would be lost; with a copy it goes. It is not read again."""
    aside = home.quarantine / "Span"
    aside.mkdir(parents=True)
    for number in range(2):
        (aside / f"{number} é%.parquet.reason").write_text("corrupt: x")
    (aside / "1 é%.parquet").write_bytes(b"copy")
    home.books.finish(2)
    with caplog.at_level(logging.WARNING, "batchmill.spark"):
        assert home.remover().remove() == 2
    assert home.left() == {"0 é%.parquet", "new.parquet"}
    assert "the quarantine has no copy of it" in caplog.text
    home.restart()
    assert chosen(home.source()) == [["new.parquet"]]


def test_what_cannot_be_removed_is_tried_again(
    home: Home, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning only."""
    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path.name.startswith("1"):
            raise PermissionError(13, "Permission denied")
        unlink(path, missing_ok)

    home.books.finish(2)
    remover = home.remover()
    monkeypatch.setattr(Path, "unlink", refuse)
    with caplog.at_level(logging.WARNING, "batchmill.spark"):
        assert remover.remove() == 2
        assert remover.remove() == 0
    assert len(caplog.records) == 1
    monkeypatch.undo()
    assert remover.remove() == 1


def test_the_lag_is_the_age_of_the_oldest_segment_that_is_not_in(home: Home) -> None:
    """By the store's last batch; hidden files and others are no segments."""
    home.segment(".tmp.parquet")
    home.segment("_tmp.parquet")
    home.segment("notes.txt")
    home.segment("newer.parquet", size=5, mtime=1060.0)
    source = home.source()
    assert source.unread(1, 1100.0) == Unread(3, 25, 100.0, new_s=100.0)
    assert source.unread(2, 1100.0) == Unread(
        2, 15, 100.0, new_s=100.0
    )  # in the store, not marked as done
    home.books.finish(2)
    assert source.unread(2, 1100.0) == Unread(2, 15, 100.0, new_s=100.0)
    (home.spool / "Span" / "new.parquet").unlink()
    assert source.unread(2, 1100.0) == Unread(1, 5, 40.0, new_s=40.0)
    (home.spool / "Span" / "newer.parquet").unlink()
    assert source.unread(2, 1100.0) == Unread()
    # A clock that is behind makes no negative age.
    home.segment("last.parquet", mtime=2000.0)
    assert source.unread(2, 1100.0) == Unread(1, 10, 0.0)
    nowhere = SpoolInput(home.spool / "none", home.books, PipelineSettings())
    assert nowhere.unread(None, 1.0) == Unread()


def test_the_oldest_segments_come_first(home: Home) -> None:
    """By the time of their last change, then by name; at any depth, hidden ones never."""
    home.books.finish(2)
    home.segment("b.parquet", mtime=500)
    home.segment("a.parquet", mtime=500)
    (home.spool / "Span" / "deep").mkdir()
    home.segment("deep/er.parquet", mtime=2000)
    home.segment(".hidden.parquet", mtime=1)
    home.segment("_hidden.parquet", mtime=1)
    home.segment("other.txt", mtime=1)
    wanted = ["a.parquet", "b.parquet", "new.parquet", "er.parquet"]
    assert chosen(home.source()) == [wanted]
    assert chosen(home.source(max_batch_files=3)) == [wanted[:3], wanted[3:]]
    assert chosen(home.source(max_batch_bytes=25)) == [wanted[:2], wanted[2:]]
    home.segment("a.parquet", size=100, mtime=500)
    assert chosen(home.source(max_batch_bytes=25)) == [wanted[:1], wanted[1:3], wanted[3:]]


def sized(number: int, rows: int = 10) -> str:
    """A name as the receiver gives it."""
    return f"{number:016}-00000000-{rows}.parquet"


def numbers(paths: Iterable[str]) -> list[int]:
    """The numbers of segments with such names."""
    return [int(Path(path).name[:16]) for path in paths]


def test_what_is_new_is_chosen_before_a_backlog(tmp_path: Path) -> None:
    """As long as the backlog is there; ``settled`` says from where on older ones wait."""
    home = Home(tmp_path)
    for number in range(20):
        home.segment(sized(number), mtime=1000 + number)
    source, pace = home.source(max_batch_rows=50), Pace(3.0)
    batches, settled, backlog = [], [], []
    for batch in range(5):
        source.look(patient=True)
        choice = source.choose(pace)
        assert choice is not None
        batches.append(numbers(choice.segments))
        settled.append(choice.settled)
        backlog.append(choice.backlog)
        home.run(*map(Path, choice.segments))
        if batch < 3:
            home.segment(sized(100 + batch), mtime=2000 + batch)
    assert batches == [
        [0, 1, 17, 18, 19],  # those of the last three seconds are new at first
        [2, 3, 4, 5, 100],
        [6, 7, 8, 9, 101],
        [10, 11, 12, 13, 102],
        [14, 15, 16],
    ]
    assert settled == [1002.0, 1006.0, 1010.0, 1014.0, None]
    assert backlog == [20, 40, 40, 40, 0]
    source.look(patient=True)
    assert not source.waiting


def test_the_lag_of_what_is_new_is_told_apart(tmp_path: Path) -> None:
    """A backlog of an hour, and a segment that came after the last batch had been chosen."""
    home = Home(tmp_path)
    for number in range(20):
        home.segment(sized(number), mtime=1000 + number)
    home.segment(sized(50), mtime=5000)
    source = home.source(max_batch_rows=50)
    source.look(patient=True)
    choice = source.choose(Pace(3.0))
    assert choice is not None
    assert numbers(choice.segments) == [0, 1, 2, 3, 50]
    assert source.unread(None, 5010.0) == Unread(21, 210, 4010.0, 210, 4010.0)
    home.run(*map(Path, choice.segments))
    assert source.unread(0, 5010.0) == Unread(16, 160, 4006.0, 160, 0.0)
    home.segment(sized(51), mtime=5004)
    assert source.unread(0, 5010.0) == Unread(17, 170, 4006.0, 170, 6.0)


def test_a_segment_from_the_future_makes_no_other_look_old(tmp_path: Path) -> None:
    """A clock was wrong, or is: what is written after a batch is new."""
    home = Home(tmp_path)
    source = home.source()
    future = home.segment("future.parquet", mtime=time.time() + 40 * 86_400)
    source.look(patient=True)
    assert source.choose(Pace(None)) is not None
    home.run(future)
    later = time.time() + 5
    home.segment("later.parquet", mtime=later)
    assert source.unread(0, later + 3).new_s == pytest.approx(3)


def test_what_is_known_of_a_segment_is_not_asked_again(tmp_path: Path) -> None:
    """Neither for the next batch nor for the lag: thousands of segments may wait."""
    home = Home(tmp_path)
    path = home.segment(sized(1), mtime=1000)
    source = home.source()
    for look in (lambda: source.unread(None, 1010.0), lambda: source.look(patient=True)):
        look()
        os.utime(path, (500, 500))  # no segment changes; so it shows who asks
        assert source.unread(None, 1010.0).oldest_s == 10
    path.unlink()
    assert source.unread(None, 1010.0) == Unread()


def test_a_plan_is_halved_by_rows(tmp_path: Path) -> None:
    """At least one segment stays in it, and at least one goes; the next have half of the rows."""
    home = Home(tmp_path)
    paths = [home.segment(sized(at, rows)) for at, rows in enumerate((10, 10, 10, 70, 10))]
    source = home.source()

    def halved(*chosen: Path) -> tuple[list[int], int] | None:
        half = source.halve(Plan(3, 1.0, 8, tuple(map(str, chosen)), settled=5.0))
        if half is None:
            return None
        assert (half[0].batch, half[0].now, half[0].settled) == (3, 1.0, 5.0)
        return numbers(half[0].segments), half[1]

    assert halved(*paths) == ([0, 1, 2], 55)
    assert halved(*paths[3:]) == ([3], 70)
    assert halved(*paths[:2]) == ([0], 10)
    assert halved(paths[0]) is None
    paths[0].unlink()
    assert halved(*paths[:2]) == ([0], 5)


def test_segments_that_are_gone_are_forgotten(home: Home) -> None:
    """One of the same name that comes later is another one."""
    home.books.finish(2)
    path = home.spool / "Span" / "0 é%.parquet"
    path.unlink()
    home.source().look(patient=False)
    assert str(path) not in home.books.read()
    home.segment(path.name, mtime=1.0)
    assert chosen(home.source()) == [[path.name, "new.parquet"]]


def test_a_spool_that_is_not_mounted_makes_nothing_forgotten(home: Home, tmp_path: Path) -> None:
    """Its folder is empty, or gone: when it is back, its segments do not count again."""
    home.books.finish(2)
    away = home.spool.rename(tmp_path / "away")
    assert chosen(home.source()) == []
    home.spool.mkdir()
    assert chosen(home.source()) == []
    home.spool.rmdir()
    away.rename(home.spool)
    assert chosen(home.source()) == [["new.parquet"]]


def test_segments_of_another_spool_are_remembered(home: Home, tmp_path: Path) -> None:
    """A pipeline reads another folder for a while, and then the first one again."""
    home.books.finish(2)
    other = tmp_path / "other" / "Span"
    other.mkdir(parents=True)
    (other / "0 é%.parquet").write_bytes(b"x")
    source = SpoolInput(other.parent, home.books, PipelineSettings())
    assert chosen(source) == [["0 é%.parquet"]]
    assert chosen(home.source()) == [["new.parquet"]]


def test_thousands_of_batches_leave_little_behind(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Segments are removed after their batch; a restart in between changes nothing."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    home.books.finish(2)
    (home.spool / "Span" / "new.parquet").unlink()
    largest = 0
    for number in range(3_000):
        if number % 500 == 0:
            home.restart()
        home.segment(f"{number:060}.parquet")
        source = home.source()
        source.look(patient=False)
        choice = source.choose(Pace(10.0))
        assert choice is not None
        assert [Path(path).stem for path in choice.segments] == [f"{number:060}"]
        home.run(*map(Path, choice.segments))
        home.remover().remove()
        largest = max(largest, (home.checkpoint / "books.jsonl").stat().st_size)
    assert home.left() == set()
    assert home.books.read() == set()
    assert largest < 300_000
    assert [path.name for path in home.checkpoint.iterdir()] == ["books.jsonl"]
