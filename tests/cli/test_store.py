"""``batchmill store repair``: what it shows, and what it removes."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from batchmill.cli import main
from batchmill.store import ClockReading, minute_of, moment_of, open_store
from tests.kit.stores import Measurement, Writer

DAY_S = 86_400.0


@pytest.fixture
def now_s(monkeypatch: pytest.MonkeyPatch) -> float:
    """The time, which stands still."""
    now_s = 1_793_000_000.0
    monkeypatch.setattr(time, "time", lambda: now_s)
    return now_s


@pytest.fixture
def url(tmp_path: Path, now_s: float) -> str:
    """A store with two days of data, and with a minute of a clock that was 40 days ahead."""
    url = f"sqlite:///{tmp_path}/metrics.db"
    with open_store(url) as store:
        writer = Writer(store)
        for number, days in enumerate((-1, 0, 40)):
            wall_s = now_s + days * DAY_S
            clock = ClockReading(wall_s, number * DAY_S)
            writer.write(Measurement(1, minute=minute_of(wall_s)), clock=clock)
    return url


def repair(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, list[str]]:
    """The exit code, and the lines that are printed."""
    monkeypatch.setattr(sys, "argv", ["batchmill", "store", "repair", *arguments])
    code = main()
    return code, capsys.readouterr().out.splitlines()


def values(url: str) -> list[int]:
    """The minutes that a store has."""
    with open_store(url, create=False) as store:
        return [value.bucket for value in store.values("calls")]


def test_it_shows_what_it_would_remove(
    url: str, now_s: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And changes nothing."""
    code, lines = repair(monkeypatch, capsys, "--store", url)
    future = moment_of(now_s + 40 * DAY_S)
    assert code == 0
    assert lines == [
        f"clock      {moment_of(now_s)}",
        f"trusted    {moment_of(now_s)}: expiry counts from no later time",
        f"newest     {future}",
        f"future     3 rows (1 by minute, 1 by hour, 1 by day), from {future} to {future}",
        "nothing was changed: --apply removes the rows, and trusts this clock",
    ]
    assert len(values(url)) == 3


def test_it_removes_what_comes_from_the_future(
    url: str,
    now_s: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In the store of a run, too; then there is nothing left to repair."""
    home = ("--home", str(tmp_path))
    code, lines = repair(monkeypatch, capsys, *home, "--apply")
    assert code == 0
    newest = moment_of(now_s)
    assert lines[-1] == f"repaired: the newest minute is {newest}; expiry follows this clock"
    assert values(url) == [minute_of(now_s - DAY_S), minute_of(now_s)]
    assert repair(monkeypatch, capsys, *home)[1][-2:] == ["future     no rows", "nothing to repair"]


def test_what_is_later_may_be_chosen(
    url: str, now_s: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hours and days that also have other minutes keep what was added to them, and it says so."""
    after = moment_of(now_s - 3600).replace(" UTC", "")
    _, lines = repair(monkeypatch, capsys, "--store", url, "--after", after)
    assert lines[3].startswith("future     5 rows (2 by minute, 2 by hour, 1 by day)")
    with open_store(url) as store:
        Writer(store, stream="x", checkpoint="x").write(
            Measurement(1, minute=minute_of(now_s - 7200)), clock=ClockReading(now_s, 0.0)
        )
    _, lines = repair(monkeypatch, capsys, "--store", url, "--after", after)
    assert "may keep what the removed minutes have added to them" in lines[4]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(("--after", "soon"), "a time such as"), (("--store", "sqlite:///no.db"), "no.db")],
)
def test_what_cannot_be_done_is_said(
    arguments: tuple[str, ...],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A time that is none; a store that is not there, which is not made."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["batchmill", "store", "repair", *arguments])
    assert main() != 0
    assert text in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
