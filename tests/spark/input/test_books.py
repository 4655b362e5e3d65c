"""The books of a stream, without Spark: what survives a crash, and that they stay small."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from batchmill.spark import PipelineError
from batchmill.spark.input import books as module
from batchmill.spark.input.books import NAME, Account, Books, Plan, read_account


def opened(folder: Path) -> Books:
    """As after a start."""
    books = Books(folder, read_account(folder) or Account())
    books.open()
    return books


def plan(number: int, *segments: str) -> Plan:
    """A plan for a batch."""
    return Plan(number, 1.5 + number, 8, segments)


def test_new_books_are_empty(tmp_path: Path) -> None:
    """A stream of which nothing is known begins with batch 0."""
    assert read_account(tmp_path) is None
    books = opened(tmp_path)
    assert (books.done, books.open_plan, books.next_batch) == (None, None, 0)
    assert (books.read(), books.offsets("t")) == (set(), {})
    account = read_account(tmp_path)
    assert account is not None
    assert (account.done, account.planned) == (None, None)


def test_a_plan_survives_until_it_is_done(tmp_path: Path) -> None:
    """With its input, its clock and its parts; then its segments are read."""
    books = opened(tmp_path)
    for number in range(3):
        books.begin(plan(number, f"/s/{number} é\udcff", "/s/x"))
        books = opened(tmp_path)
        assert books.open_plan == plan(number, f"/s/{number} é\udcff", "/s/x")
        assert books.done == (number - 1 if number else None)
        read = books.read()
        assert read == {name for done in range(number) for name in (f"/s/{done} é\udcff", "/s/x")}
        assert books.read(number) == {*read, f"/s/{number} é\udcff", "/s/x"}
        assert books.read(number - 1) == read
        books.finish(number)
        books.finish(number)
        books = opened(tmp_path)
        assert (books.done, books.open_plan, books.next_batch) == (number, None, number + 1)
    account = read_account(tmp_path)
    assert account is not None
    assert account.segments == 6


def test_a_plan_without_input_survives(tmp_path: Path) -> None:
    """That of a batch that settles spans: those that have waited long enough, or all."""
    books = opened(tmp_path)
    for number, everything in enumerate((True, False)):
        settling = Plan(number, 1.5, 8, settled=1.25, step=-7.5, expire_all=everything)
        assert not settling.has_input
        books.begin(settling)
        books = opened(tmp_path)
        assert books.open_plan == settling
        books.finish(number)
    assert (books.done, books.read()) == (1, set())


def test_offsets_of_a_topic(tmp_path: Path) -> None:
    """One for each partition, of each topic that was read."""
    books = opened(tmp_path)
    books.begin(Plan(0, 1.0, 8, topic="t", offsets={0: (0, 5), 1: (3, 4)}))
    assert books.offsets("t") == {}
    assert books.offsets("t", 0) == {0: 5, 1: 4}
    books.finish(0)
    books.begin(Plan(1, 1.0, 8, topic="t", offsets={1: (4, 9), 2: (0, 1)}))
    books = opened(tmp_path)
    assert books.open_plan == Plan(1, 1.0, 8, topic="t", offsets={1: (4, 9), 2: (0, 1)})
    assert books.offsets("t") == {0: 5, 1: 4}
    books.finish(1)
    books = opened(tmp_path)
    assert books.offsets("t") == {0: 5, 1: 9, 2: 1}
    assert books.offsets("other", 9) == {}


def test_a_batch_is_planned_once(tmp_path: Path) -> None:
    """And no other before it is done."""
    books = opened(tmp_path)
    with pytest.raises(ValueError, match="cannot be planned"):
        books.begin(plan(1))
    books.begin(plan(0))
    for number in (0, 1):
        with pytest.raises(ValueError, match="cannot be planned"):
            books.begin(plan(number))


def test_how_often_a_batch_was_begun_survives(tmp_path: Path) -> None:
    """An error that has nothing to do with its size takes one back; a new plan begins anew."""
    books = opened(tmp_path)
    books.begin(plan(0, "/s/a", "/s/b"))
    assert books.begun == 1
    books = opened(tmp_path)
    assert books.begun == 1
    books.begin_again()
    books.begin_again()
    assert books.begun == 3
    books = opened(tmp_path)
    assert books.begun == 3
    books.excuse()
    books = opened(tmp_path)
    assert books.begun == 2
    books.replace(plan(0, "/s/a"))
    books = opened(tmp_path)
    assert books.begun == 1
    books.finish(0)
    books.begin(plan(1))
    assert books.begun == 1


def test_an_open_plan_can_be_made_smaller(tmp_path: Path) -> None:
    """What is not in it any more was not read."""
    books = opened(tmp_path)
    books.begin(plan(0, "/s/a", "/s/b"))
    smaller = Plan(0, 1.5, 8, ("/s/a",), settled=7.5, most=10)
    books.replace(smaller)
    books = opened(tmp_path)
    assert books.open_plan == smaller
    assert books.read(0) == {"/s/a"}
    books.finish(0)
    books = opened(tmp_path)
    assert (books.read(), books.next_batch) == ({"/s/a"}, 1)
    for number in (0, 1):
        with pytest.raises(ValueError, match="is not open"):
            books.replace(plan(number))


def test_a_crash_at_any_byte_loses_the_last_line_only(tmp_path: Path) -> None:
    """A line that is not whole was never answered for: the batch was not run, or runs again."""
    books = opened(tmp_path)
    books.begin(plan(0, "/s/a"))
    books.finish(0)
    before = (tmp_path / NAME).read_bytes()
    books.begin(plan(1, "/s/b"))
    books.finish(1)
    after = (tmp_path / NAME).read_bytes()
    assert after.startswith(before)
    for size in range(len(before), len(after) + 1):
        (tmp_path / NAME).write_bytes(after[:size])
        account = read_account(tmp_path)
        assert account is not None
        lines = after[:size].count(b"\n") - before.count(b"\n")
        assert account.planned == (1 if lines else 0)
        assert account.done == (1 if lines == 2 else 0)
        again = opened(tmp_path)
        if again.open_plan is None and again.done == 0:
            again.begin(plan(1, "/s/c"))
        again.finish(1)
        assert opened(tmp_path).read() == {"/s/a", "/s/b" if lines else "/s/c"}


def test_garbage_at_the_end_is_what_a_power_cut_leaves(tmp_path: Path) -> None:
    """Anywhere else, it is an error that says what to do."""
    books = opened(tmp_path)
    books.begin(plan(0, "/s/a"))
    file = tmp_path / NAME
    whole = file.read_bytes()
    for tail in (b"\0" * 7, b"\0" * 7 + b"\n", b'{"done"'):
        file.write_bytes(whole + tail)
        assert opened(tmp_path).open_plan == plan(0, "/s/a")
    for broken in (b"{}\n", b"\0\n", b"[]\n"):
        file.write_bytes(whole.replace(b"\n", b"\n" + broken, 1))
        with pytest.raises(PipelineError, match="both from the same copy"):
            read_account(tmp_path)
    file.write_bytes(b"\0\n")
    with pytest.raises(PipelineError, match="in line 1"):
        read_account(tmp_path)


def test_part_of_a_line_after_a_full_disk_is_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process goes on; the next line begins where the last whole one ends."""
    books = opened(tmp_path)
    books.begin(plan(0, "/s/a"))

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        books.finish(0)
    assert books.done is None
    monkeypatch.undo()
    books.finish(0)
    lines = (tmp_path / NAME).read_text().splitlines()
    assert [json.loads(line) for line in lines][1:] == [
        plan(0, "/s/a").line() | {"segments": ["/s/a"]},
        {"done": 0},
    ]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for the disk: what is in the files does not depend on it."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.mark.usefixtures("quick")
def test_books_stay_small_where_segments_are_removed(tmp_path: Path) -> None:
    """Five thousand batches of ten segments, each forgotten after its batch."""
    books = opened(tmp_path)
    most = 0
    for number in range(5_000):
        names = [f"/var/lib/batchmill/spool/Span/{number:020}-{at}.parquet" for at in range(10)]
        books.begin(plan(number, *names))
        books.finish(number)
        books.forget(names)
        most = max(most, (tmp_path / NAME).stat().st_size)
    assert most < 300_000
    assert books.read() == set()
    assert opened(tmp_path).done == number
    books.open()
    assert (tmp_path / NAME).stat().st_size < 200


@pytest.mark.usefixtures("quick")
def test_books_of_a_topic_stay_small(tmp_path: Path) -> None:
    """An offset for each partition."""
    books = opened(tmp_path)
    for number in range(5_000):
        offsets = dict.fromkeys(range(12), (number * 100, number * 100 + 100))
        books.begin(Plan(number, 1.0, 8, topic="spans", offsets=offsets))
        books.finish(number)
    assert (tmp_path / NAME).stat().st_size < 300_000
    opened(tmp_path)
    assert (tmp_path / NAME).stat().st_size < 1_000


@pytest.mark.usefixtures("quick")
def test_what_still_exists_is_kept(tmp_path: Path) -> None:
    """The file is at most twice as large as the names; compacting is rare."""
    books = opened(tmp_path)
    written = 0
    for number in range(3_000):
        names = [f"/var/lib/batchmill/spool/Span/{number:020}-{at}.parquet" for at in range(10)]
        before = (tmp_path / NAME).stat().st_ino
        books.begin(plan(number, *names))
        books.finish(number)
        written += before != (tmp_path / NAME).stat().st_ino
    names_size = 30_000 * 70
    assert (tmp_path / NAME).stat().st_size < 2.5 * names_size
    assert written < 20
    assert len(opened(tmp_path).read()) == 30_000


def test_folders_are_synced_before_names_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut, a removed segment may be there again: then its name must be, too."""
    spool = tmp_path / "spool"
    spool.mkdir()
    steps = []
    monkeypatch.setattr(module, "sync", lambda folder: steps.append(f"sync {folder}"))
    monkeypatch.setattr(module, "write_whole", lambda *_, **__: steps.append("write"))
    books = Books(tmp_path, Account(read={str(spool / "a"), "/gone/b"}))
    books.forget([str(spool / "a"), "/gone/b"])
    books.open()
    books.open()
    assert steps == [f"sync {spool}", "write", "write"]
