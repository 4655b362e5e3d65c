"""``batchmill alerts``: what it prints, and its exit codes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from batchmill.alerts import DEMO_RULES
from batchmill.cli import main
from batchmill.oal import load
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


OWN = """p2 = from(Service.latency).percentile2(10);
old = from(Service.latency).percentile(10);
steps = from(Service.latency).histogram(100, 30);
few = from(Service.latency).histogram(100, 2);
codes = from(Service.*).labelCount(httpResponseStatusCode);
plain = from(Service.latency).longAvg();
"""


@pytest.mark.parametrize(
    ("selected", "said"),
    [
        ("p2{p='98'}", "p2 has no label p='98': it has p='50', '75', '90', '95', '99'"),
        ("p2{p='50,100,98'}", "p2 has no labels p='100', '98': it has p='50', "),
        ("p2{p!='9'}", "p2 has no label p='9': it has p='50', "),
        ("p2{rank='99'}", "p2 has no label rank='99': it has p='50', "),
        ("plain{p='99'}", "plain has no labels: it is longAvg()"),
        ("old{p='99'}", "old has no label p='99': it has p='0', '1', '2', '3', '4'"),
        ("few{le='150'}", "few has no label le='150': it has le='0', '100', '200'"),
        ("steps{le='-1'}", "steps has no label le='-1': it has le='0', '100', '200', …, '3000'"),
        ("codes{code='500'}", "codes has no label code='500': it has n='…', the values of the"),
        ("p2{p='50,99'}", None),
        ("p2{_='0,4'}", None),
        ("old{_='4'}", None),
        ("steps{le='3000'}", None),
        ("codes{n='500'}", None),
        ("codes{n!='200'}", None),
    ],
)
def test_check_prints_which_labels_a_metric_has(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    selected: str,
    said: str | None,
) -> None:
    """Of scripts and of a store: a rule that selects others never fires."""
    (tmp_path / "own.oal").write_text(OWN)
    rules = tmp_path / "alerts.toml"
    rules.write_text(f'''rule = [{{name="r", expression="{selected}", comparison="> 5"}}]''')
    url = f"sqlite:///{tmp_path}/store.db"
    with open_store(url) as store:
        store.register(load(tmp_path / "own.oal"), stream="live")
    for where in (f"--oal={tmp_path / 'own.oal'}", f"--store={url}"):
        assert alerts(monkeypatch, "check", str(rules), where) == (2 if said else 0)
        shown = capsys.readouterr()
        assert (said or "1 rule") in (shown.err if said else shown.out)


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
