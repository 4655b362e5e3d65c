"""``batchmill alerts``: what it prints, and its exit codes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from batchmill.alerts import DEMO_RULES
from batchmill.cli import main
from batchmill.store import open_store
from tests.alerts.kit import ERRORS, Shop, rules_of


def alerts(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code of the command."""
    monkeypatch.setattr(sys, "argv", ["batchmill", "alerts", *arguments])
    return main()


def test_check_prints_the_rules(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One a line, in words, and how many there are."""
    assert alerts(monkeypatch, "check", str(DEMO_RULES)) == 0
    lines = capsys.readouterr().out.splitlines()
    condition = "avg(service_sla / 100) < 75 && avg(service_cpm) >= 20 in 1 minute"
    assert lines[0] == f"service_errors: {condition}; critical"
    assert lines[-1] == f"{DEMO_RULES}: 3 rules"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (ERRORS.replace("service_sla", "service_slaa"), "there is no metric service_slaa"),
        (ERRORS.replace("/ 100", "/ endpoint_sla"), "different sources (Endpoint, Service)"),
        ('slo = [{name="s", metric="service_cpm", objective=99}]', "service_cpm is cpm()"),
        (ERRORS + "perod = 5", "there is no field perod; did you mean period?"),
    ],
)
def test_check_prints_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    text: str,
    said: str,
) -> None:
    """With the path of the file, and exit code 2."""
    path = tmp_path / "alerts.toml"
    path.write_text(text)
    assert alerts(monkeypatch, "check", str(path)) == 2
    error = capsys.readouterr().err
    assert said in error
    assert str(path) in error


def test_check_says_what_of_skywalking_is_not_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The rest can be used; the exit code is 1."""
    path = tmp_path / "alarm-settings.yml"
    path.write_text("rules:\n  a_rule:\n    expression: avg(service_sla) < 1\nhooks: {}\n")
    assert alerts(monkeypatch, "check", str(path)) == 1
    shown = capsys.readouterr()
    assert "not read: hooks: name the receivers" in shown.err
    assert shown.out.endswith("1 rule, 1 part not read\n")


def test_check_uses_the_metrics_of_scripts_or_of_a_store(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of one's own."""
    (tmp_path / "own.oal").write_text("mine = from(Service.*).percent(latency < 500);")
    rules = tmp_path / "alerts.toml"
    rules.write_text('slo = [{name="fast", metric="mine", objective=99}]')
    assert alerts(monkeypatch, "check", str(rules)) == 2
    assert alerts(monkeypatch, "check", str(rules), f"--oal={tmp_path / 'own.oal'}") == 0
    url = f"sqlite:///{tmp_path}/store.db"
    with open_store(url) as store:
        Shop(store)
    assert alerts(monkeypatch, "check", str(rules), f"--store={url}") == 2
    rules.write_text(ERRORS)
    assert alerts(monkeypatch, "check", str(rules), f"--store={url}") == 0


def test_list_prints_what_fires_and_what_fired(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """As a table that is never wrapped, and as JSON."""
    url = f"sqlite:///{tmp_path}/store.db"
    with open_store(url) as store:
        shop = Shop(store)
        shop.minute(0, web=(8, 2), cart=(8, 2))
        shop.minute(1, web=(8, 2), cart=(10, 0))
        shop.minute(2, web=(8, 2))
        with shop.engine(rules_of(tmp_path)) as engine:
            for number in (0, 1):
                shop.over(number)
                engine.evaluate()
    assert alerts(monkeypatch, "list", f"--store={url}") == 0
    head, firing, resolved, total = capsys.readouterr().out.splitlines()
    assert head.split() == ["state", "severity", "rule", "entity", "since", "until", "message"]
    assert firing.split()[:6] == ["firing", "warning", "errors", "web", "2024-02-29", "12:01"]
    assert firing.endswith("web: 80 %")
    assert resolved.split()[:4] == ["resolved", "warning", "errors", "cart"]
    assert total == "1 firing, 0 pending; 1 rule"
    assert alerts(monkeypatch, "list", f"--store={url}", "--json") == 0
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    phases = [(one["phase"], one["entity_name"]) for one in shown]
    assert phases == [("firing", "web"), ("resolved", "cart")]


def test_list_without_a_store(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Says what to do."""
    assert alerts(monkeypatch, "list", f"--home={tmp_path}") == 1
    assert "run the pipeline first" in capsys.readouterr().err
