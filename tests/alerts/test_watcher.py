"""A file of rules that changes while they are evaluated: it is read again, or it is refused."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchmill.alerts import AlertRulesError, RuleWatcher
from batchmill.store import open_store
from tests.alerts.kit import ERRORS, Shop, ends, firing
from tests.kit.processes import wait_for_json
from tests.kit.threads import until

MANY = """
[[rule]]
name = "many"
expression = "service_cpm"
comparison = "> 1"
"""
BAD, GOOD = (8, 2), (10, 0)


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    """A shop whose first minute has errors of one service."""
    with open_store(f"sqlite:///{tmp_path}/store.db") as store:
        shop = Shop(store)
        shop.minute(0, web=BAD)
        shop.minute(1, web=BAD)
        shop.over(0)
        yield shop


def written(folder: Path, text: str) -> Path:
    """The file with these rules."""
    path = folder / "alerts.toml"
    path.write_text(text)
    return path


def test_changed_rules_apply_from_the_next_evaluation_on(shop: Shop, tmp_path: Path) -> None:
    """A rule that is gone is resolved, a new one begins; nothing is started again."""
    path = written(tmp_path, ERRORS)
    watcher = RuleWatcher(path)
    with shop.engine(watcher.file.rules) as engine:
        engine.evaluate()
        assert firing(engine) == [("errors", "web")]
        written(tmp_path, MANY)
        assert [watcher.poll(engine) for _ in range(3)] == [False, True, False]
        assert firing(engine) == [("errors", "web")], "not in the middle of an evaluation"
        engine.evaluate()
        assert firing(engine) == [("many", "web")]
        assert engine.stats().reloads == {"loaded": 1, "refused": 0}
    history = [(one.rule, one.ends_s is None) for one in shop.store.alert_episodes(0, 2**40)]
    assert sorted(history) == [("errors", False), ("many", True)]


def test_a_rule_that_stays_keeps_its_state(shop: Shop, tmp_path: Path) -> None:
    """By its name: what fires goes on firing since the same minute, and is not told again."""
    path = written(tmp_path, ERRORS)
    watcher = RuleWatcher(path)
    url = "http://127.0.0.1:1/hook"
    with shop.engine(watcher.file.rules, [url]) as engine:
        engine.evaluate()
        written(tmp_path, ERRORS.replace("< 95", "< 90") + MANY.replace("> 1", "> 1000"))
        watcher.poll(engine)
        watcher.poll(engine)
        shop.minute(2, web=BAD)
        shop.over(1)
        engine.evaluate()
        assert [(one.rule, one.since_s) for one in engine.firing()] == [("errors", ends(0))]
        assert engine.stats().rules == 2
    assert len(shop.store.notifications(url)) == 1


@pytest.mark.parametrize("fault", ["perod = 5", "missing"])
def test_a_faulty_file_changes_nothing(
    shop: Shop, tmp_path: Path, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The rules before it stay, and the reason is reported until the file is good again."""
    path = written(tmp_path, ERRORS)
    watcher = RuleWatcher(path)
    with shop.engine(watcher.file.rules) as engine:
        if fault == "missing":
            path.unlink()
        else:
            written(tmp_path, ERRORS + fault)
        assert [watcher.poll(engine) for _ in range(4)] == [False, True, False, False]
        engine.evaluate()
        assert firing(engine) == [("errors", "web")]
        stats = engine.stats()
        assert stats.reloads == {"loaded": 0, "refused": 1}
        assert ("perod" if fault != "missing" else str(path)) in stats.rules_fault
        assert "the former ones stay" in caplog.text
        written(tmp_path, ERRORS + MANY)
        watcher.poll(engine)
        watcher.poll(engine)
        assert (engine.stats().rules_fault, engine.stats().reloads["loaded"]) == ("", 1)


def test_a_file_that_is_being_written_is_not_read(shop: Shop, tmp_path: Path) -> None:
    """Only once it has stayed the same from one look to the next: half of it may be valid."""
    watcher = RuleWatcher(written(tmp_path, ERRORS + MANY))
    with shop.engine(watcher.file.rules) as engine:
        for text in (ERRORS, ERRORS + MANY[:40], ERRORS + MANY.replace("1", "22")):
            written(tmp_path, text)
            assert not watcher.poll(engine)
        assert watcher.poll(engine)
        assert len(watcher.file.rules) == 2


def test_a_file_must_be_good_at_the_start(tmp_path: Path) -> None:
    """There are no rules before it that could stay."""
    with pytest.raises(AlertRulesError, match="perod"):
        RuleWatcher(written(tmp_path, ERRORS + "perod = 5"))


@pytest.mark.system
def test_the_process_reads_its_file_again(shop: Shop, tmp_path: Path) -> None:
    """`batchmill alerts run` reports the new rules, or why it keeps the former ones."""
    path, status = written(tmp_path, ERRORS), tmp_path / "alerts.json"
    command = [sys.executable, "-m", "batchmill", "alerts", "run", f"--rules={path}"]
    command += [f"--store=sqlite:///{tmp_path}/store.db", f"--status={status}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            wait_for_json(status, "rules")
            written(tmp_path, ERRORS + MANY)
            until(lambda: wait_for_json(status)["reloads"]["loaded"] == 1)
            written(tmp_path, "")
            until(lambda: wait_for_json(status)["rules_fault"] != "")
            report = wait_for_json(status)
            assert (report["rules"], report["reloads"]) == (2, {"loaded": 1, "refused": 1})
            assert "there is no rule in it" in report["rules_fault"]
        finally:
            process.send_signal(signal.SIGTERM)
        printed, _ = process.communicate()
    assert process.returncode == 0
    assert "read again: 2 rules" in printed
