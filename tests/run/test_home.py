"""Every file in the home of a run is in a table of the documentation, which names its bound.

``tests/system`` looks at those of real runs.
"""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tests.kit.files import ROOT

KIB, MIB = 2**10, 2**20


@dataclass(frozen=True)
class Bound:
    """How large and how many the files of a pattern get, however long a run lasts."""

    bytes: int | None = None
    """Of one file; None: the proofs have the bound of all together."""
    count: int | None = None
    proofs: tuple[str, ...] = ()
    """The tests that write more than that with the code that writes these files, and see that it
    holds: for each pattern that has no bytes and count, or whose code has a limit."""


_FILES = "tests/package/test_files.py::"
_KEEPER = "tests/traces/test_keeper.py::"
_KEEPER_FAULTS = "tests/traces/test_keeper_faults.py::"
_QUARANTINE = "tests/spark/files/test_quarantine.py::"
_SQLITE = "tests/store/test_sqlite.py::"
_STATE = "tests/spark/files/test_state.py::"
BOUNDS = {
    "spool/<type>/*.parquet": Bound(
        proofs=("tests/spool/test_submit.py::test_the_bytes_that_are_unread_are_bounded",)
    ),
    "spool/<type>/.*.tmp": Bound(
        proofs=("tests/spool/test_segments.py::test_what_a_dead_writer_left_is_removed",)
    ),
    "spool-quarantine/<type>/**": Bound(
        proofs=(
            f"{_QUARANTINE}test_the_oldest_is_removed",
            f"{_QUARANTINE}test_entries_are_bounded",
            f"{_QUARANTINE}test_a_reason_goes_once_its_segment_is_gone",
            f"{_QUARANTINE}test_what_was_being_written_a_day_ago_is_removed",
            "tests/spark/test_keep_spans.py::test_events_and_quarantined_segments_are_not_kept",
        )
    ),
    "spool-quarantine/.<stream>-<batch>/**": Bound(
        proofs=(
            "tests/spark/input/test_failures.py::test_a_batch_that_is_run_again_replaces_its_rows",
            f"{_QUARANTINE}test_what_was_being_written_a_day_ago_is_removed",
        )
    ),
    "checkpoint/batchmill.json": Bound(KIB, 1),
    "checkpoint/books.jsonl": Bound(
        256 * KIB,
        1,
        ("tests/spark/input/test_books.py::test_books_stay_small_where_segments_are_removed",),
    ),
    "checkpoint/progress.json": Bound(
        100 * KIB, 1, ("tests/spark/runtime/test_upkeep.py::test_the_newest_batches_are_listed",)
    ),
    ".*.tmp": Bound(
        proofs=(
            f"{_FILES}test_what_killed_writers_have_left_is_removed",
            "tests/run/test_supervisor.py::test_a_home_is_one_run_s",
        )
    ),
    "checkpoint/.*.tmp": Bound(
        proofs=(
            "tests/spark/test_units.py"
            "::test_what_a_killed_pipeline_was_writing_is_removed_from_the_checkpoint",
        )
    ),
    "run/.*.tmp": Bound(proofs=("tests/run/test_supervisor.py::test_a_home_is_one_run_s",)),
    "traces/.*.tmp": Bound(proofs=(f"{_KEEPER}test_files_that_no_change_names_are_removed",)),
    "checkpoint/state/<batch>-<id>-<parts>/**": Bound(
        proofs=(
            f"{_STATE}test_no_id_is_kept_much_longer_than_its_window",
            f"{_STATE}test_files_that_no_commit_names_are_removed",
            f"{_STATE}test_what_tasks_left_that_were_run_again_is_removed",
            f"{_STATE}test_known_hosts_are_bounded",
        )
    ),
    "checkpoint/kafka/<batch>/**": Bound(
        proofs=(
            "tests/spark/input/test_kafka.py::test_files_of_batches_that_are_done_are_removed",
            "tests/spark/input/test_kafka.py"
            "::test_batches_are_bounded_by_the_rows_of_their_messages",
        )
    ),
    "checkpoint/outbox/*/*.arrow": Bound(
        proofs=(
            "tests/outbox/test_outbox.py::test_beyond_its_bound_the_oldest_go",
            "tests/outbox/test_outbox.py"
            "::test_what_a_stream_that_is_gone_left_is_removed_after_a_day",
        )
    ),
    "checkpoint/outbox/outbox.json": Bound(KIB, 1),
    "checkpoint/outbox/*.lock": Bound(0, 8),
    "checkpoint/backfill-<name>/**": Bound(
        proofs=("tests/spark/runtime/test_backfill.py::test_a_backfill_is_forgotten_after_a_month",)
    ),
    "metrics.db": Bound(
        None,
        1,
        (
            "tests/store/test_ttl.py"
            "::test_names_without_end_are_as_many_as_those_of_the_days_that_are_kept",
            "tests/alerts/test_engine.py::test_waiting_notifications_are_bounded",
            "tests/alerts/test_engine.py::test_old_episodes_are_forgotten",
        ),
    ),
    "metrics.db-wal": Bound(
        256 * MIB, 1, (f"{_SQLITE}test_the_log_of_a_large_commit_is_cut_back",)
    ),
    "metrics.db-shm": Bound(MIB, 1),
    "metrics.db.<stream>-<id>.lock": Bound(
        0, 8, (f"{_SQLITE}test_locks_of_streams_that_have_ended_are_removed",)
    ),
    "traces/hour=*/*.parquet": Bound(
        proofs=(
            f"{_KEEPER}test_the_oldest_is_dropped_beyond_the_size",
            f"{_KEEPER}test_what_is_too_old_is_dropped_and_counted",
            f"{_KEEPER}test_a_time_far_ahead_makes_no_folders",
            f"{_KEEPER}test_small_files_of_an_hour_are_merged",
        )
    ),
    "traces/hour=*/.*.part": Bound(
        proofs=(f"{_KEEPER}test_files_that_no_change_names_are_removed",)
    ),
    "traces/.incoming/*.parquet": Bound(proofs=(f"{_KEEPER_FAULTS}test_what_waits_is_bounded",)),
    "traces/.incoming/.*.part": Bound(
        proofs=(f"{_KEEPER}test_files_that_no_change_names_are_removed",)
    ),
    "traces/.stats.json": Bound(10 * KIB, 1),
    "traces/.change.json": Bound(100 * KIB, 1),
    "traces/.export.lock": Bound(0, 1),
    "tmp/batchmill-<id>/**": Bound(
        proofs=(
            "tests/spark/files/test_temporary.py::test_temporary_files_do_not_grow_with_batches",
            f"{_FILES}test_folders_of_processes_that_have_ended_are_removed",
        )
    ),
    "tmp/batchmill-<id>.lock": Bound(
        0, 2, (f"{_FILES}test_folders_of_processes_that_have_ended_are_removed",)
    ),
    "source.json": Bound(KIB, 1),
    "remote-write-<id>.json": Bound(KIB, 8),
    "run/*.json": Bound(100 * KIB, 12),
    "run/*.lock": Bound(0, 2),
    "log/<process>.log*": Bound(
        10 * MIB, 3 * 12, ("tests/run/test_supervisor.py::test_a_log_begins_anew_when_it_is_large",)
    ),
}
"""By the patterns of the documentation; counts are those of a run with a handful of exporters."""


MAY_BE_EMPTY = (
    *("spool", "spool/Span", "traces/.incoming"),
    *("checkpoint/outbox", "checkpoint/state", "checkpoint/kafka"),
)
"""Folders that stay when they are."""


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


def matches_folder(folder: str, pattern: str) -> bool:
    """Whether a folder is one of those on the way to the files of a pattern, or below its **."""
    ways = [str(way) for way in PurePosixPath(pattern).parents][:-1]
    return any(matches(folder, way) for way in ways) or (
        "**" in pattern and matches(folder, pattern)
    )


def check_home(home: Path) -> set[str]:
    """Compare all files and folders of a home with their bounds; the patterns that have files."""
    paths = {str(path.relative_to(home)): path for path in home.rglob("*")}
    files = [name for name, path in paths.items() if path.is_file()]
    assert [file for file in files if sum(matches(file, known) for known in BOUNDS) != 1] == []
    used = set()
    for pattern, bound in BOUNDS.items():
        own = [file for file in files if matches(file, pattern)]
        used |= {pattern} if own else set()
        assert bound.count is None or len(own) <= bound.count, pattern
        for file in own:
            assert bound.bytes is None or paths[file].stat().st_size <= bound.bytes, file
    for name, path in paths.items():
        if path.is_dir():
            assert any(matches_folder(name, pattern) for pattern in BOUNDS), name
            # Of a JVM that ends, there may be folders which it has just emptied.
            may_be_empty = name in MAY_BE_EMPTY or name.startswith("tmp/")
            assert any(path.iterdir()) or may_be_empty, name
    return used


def test_the_patterns_tell_files_apart() -> None:
    """A file or a folder that nobody knows fits none."""
    known = bounds()
    assert len(known) > 15
    for file in ("spool/Span/1-2-3.parquet", "log/ingest.log.1", "metrics.db", "run/web.json"):
        assert sum(matches(file, pattern) for pattern in known) == 1, file
    for file in ("core", "spool/x.parquet", "run/a/b.json", "checkpoint/spark/0", "log/x.txt"):
        assert not any(matches(file, pattern) for pattern in known), file
    for folder in ("spool", "spool/Span", "checkpoint/state/1-a-2/ids", "traces/.incoming"):
        assert any(matches_folder(folder, pattern) for pattern in known), folder
    for folder in ("core", "run/a", "checkpoint/spark", "traces/x", "spool/Span/x"):
        assert not any(matches_folder(folder, pattern) for pattern in known), folder


def test_every_pattern_has_a_bound_that_is_tested() -> None:
    """By bytes and count, which a real run is compared with, or by a test that is there."""
    assert list(BOUNDS) == bounds()
    for pattern, bound in BOUNDS.items():
        assert bound.proofs or None not in (bound.bytes, bound.count), pattern
        for proof in bound.proofs:
            file, _, test = proof.partition("::")
            assert f"\ndef {test}(" in (ROOT / file).read_text("utf-8"), proof
