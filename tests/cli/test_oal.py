"""``batchmill oal check``: what scripts define, or every error in them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from batchmill import oal
from batchmill.cli import main


def check(monkeypatch: pytest.MonkeyPatch, *paths: str) -> int:
    """Run the command; the exit code."""
    monkeypatch.setattr(sys, "argv", ["batchmill", "oal", "check", *paths])
    return main()


def test_check_prints_what_scripts_define(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Metric, source, function, filters and cost, and a summary; exit code 0."""
    assert check(monkeypatch, str(oal.core_script())) == 0
    out, err = capsys.readouterr()
    assert err == ""
    (line,) = [line for line in out.splitlines() if line.startswith("endpoint_relation_cpm ")]
    assert line.split() == [
        *("endpoint_relation_cpm", "EndpointRelation", "*", "cpm()"),
        *("detectPoint==DetectPoint.SERVER", "1", "state,", "1", "shared"),
    ]
    assert "metrics over 18 sources" in out.splitlines()[-1]


def test_check_prints_every_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On stderr, with nothing on stdout and exit code 1; a missing file is one of them."""
    file = tmp_path / "x.oal"
    file.write_text("a = from(Servce.*).cpm();\nb = from(Service.*).nope();")
    assert check(monkeypatch, str(file), str(tmp_path / "none")) == 1
    out, err = capsys.readouterr()
    assert out == ""
    for said in (f"{file}:1:10", f"{file}:2:21", "cannot be read", "3 errors in 2 scripts"):
        assert said in err


def test_check_draws_a_table_in_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """With rich, and brackets in a script are no markup to it."""
    file = tmp_path / "x.oal"
    file.write_text('m = from(Service.*).filter(tag["red"] == "x").cpm(); disable(n);')
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "160")
    assert check(monkeypatch, str(file)) == 0
    out = capsys.readouterr().out
    assert 'tag["red"]=="x"' in out
    assert "─" in out
    assert out.splitlines()[-1].endswith("disabled: n")
