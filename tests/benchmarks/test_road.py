"""The benchmark of the whole path: its requests, the time of all processes, a backlog's goals."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from benchmarks.road import __main__ as road
from benchmarks.road import backlog
from benchmarks.road.backlog import Backlog
from benchmarks.road.cost import REQUEST_SPANS, requests
from tests.kit.files import ROOT

END_NS = 1_800_000_000 * 10**9
BUSY = "import time\nwhile time.process_time() < 0.3: pass"


def test_all_receivers_get_the_same_requests() -> None:
    """Byte by byte, however often they are made."""
    sent = [list(requests(2 * REQUEST_SPANS, 1, END_NS)) for _ in range(2)]
    assert sent[0] == sent[1]
    assert len(set(sent[0])) == 2


def test_requests_of_another_batch_have_other_ids() -> None:
    """Or the pipeline would drop them as duplicates."""
    one, other = (next(requests(REQUEST_SPANS, number, END_NS)) for number in (1, 2))
    assert one != other


def test_processor_time_includes_processes_that_have_ended() -> None:
    """A task's worker may have ended before the batch has."""
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BUSY!r}], check=True)"
    # In a process of its own: servers of other tests may end meanwhile.
    script = (
        "import os, subprocess, sys; from benchmarks.kit.machine import tree_cpu_s; "
        "before = tree_cpu_s(os.getpid()); "
        f"subprocess.run([sys.executable, '-c', {nested!r}], check=True); "
        "print(tree_cpu_s(os.getpid()) - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, cwd=ROOT
    )
    assert float(done.stdout) >= 0.3


def missed(**other: Any) -> list[str]:
    """The goals that a backlog of a thousand spans and ten live ones misses."""
    good: dict[str, Any] = {
        "spans": 1_000, "rate": 10, "live": 10, "counted": 1_010, "starts": 1,
        "ages": [30.0, 15.0],
    }  # fmt: skip
    goals = road._goals(Backlog(**good | other))
    return [goal.what for goal in goals if goal.verdict == "MISSED"]


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({"counted": 1_009}, "spans counted to those sent"),
        ({"counted": 1_011}, "spans counted to those sent"),
        ({"starts": 2}, "starts of the pipeline"),
        ({"ages": [1.0, 15.1]}, "age of the newest data after the first batch"),
    ],
)
def test_a_backlog_is_counted_without_a_restart_beside_what_is_new(
    other: dict[str, Any], what: str
) -> None:
    """All of it once; the newest data is as old as the target and 5 s, after the first batch."""
    assert missed() == []
    assert missed(**other) == [f"a backlog of 1,000 spans: {what}"]


def test_a_pipeline_that_ends_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a supervisor does, and each start is counted."""
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    follow = backlog._Watch.follow
    followed: list[bool] = []

    @contextlib.contextmanager
    def pipeline_of(home: Path, *_: str) -> Iterator[subprocess.Popen[bytes]]:
        (home / "pipeline.log").write_text("killed", "utf-8")
        yield ended

    def follow_once(*given: Any) -> bool:
        followed.append(bool(followed) or follow(*given))
        return followed[-1]

    monkeypatch.setattr(backlog, "pipeline_of", pipeline_of)
    monkeypatch.setattr(backlog._Watch, "follow", follow_once)
    assert backlog.measure(spans=REQUEST_SPANS).starts == 2
    assert followed == [False, True]


def test_each_size_is_that_of_a_part() -> None:
    """So that a run of some parts says nothing about the sizes of others."""
    sizes = [name for part in road.PARTS for name in road.SIZES[part]]
    assert sorted(sizes) == sorted(field.name for field in fields(road.Size))
