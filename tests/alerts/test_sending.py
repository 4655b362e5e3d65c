"""Notifications reach webhooks and a real Alertmanager, at least once, whatever they answer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchmill import ConfigError
from batchmill.alerts import AlertEngine, Receiver
from batchmill.store import open_store
from tests.alerts.kit import ERRORS, Shop, ends, rules_of
from tests.kit.processes import free_port
from tests.kit.servers.alertmanager import Webhooks, running_alertmanager
from tests.kit.threads import until
from tests.web.kit import START_S

BAD, GOOD = (8, 2), (10, 0)
FIRING, RESOLVED = ("firing", "errors", "web"), ("resolved", "errors", "web")


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    """An empty shop."""
    with open_store(f"sqlite:///{tmp_path}/store.db") as store:
        yield Shop(store)


@pytest.fixture
def hooks() -> Iterator[Webhooks]:
    """A server for webhooks."""
    with Webhooks() as server:
        yield server


def fire(shop: Shop, number: int = 0) -> None:
    """Let a minute be bad, and closed."""
    shop.minute(number, web=BAD)
    shop.minute(number + 1, web=GOOD)
    shop.over(number)


def resolve(shop: Shop, number: int = 1) -> None:
    """Let the next minute be good, and closed."""
    shop.minute(number + 1, web=GOOD)
    shop.over(number)


def balance(engine: AlertEngine) -> None:
    """What was queued was sent, dropped, or waits."""
    stats = engine.stats()
    done = sum(stats.sent.values()) + sum(stats.dropped.values())
    assert stats.queued == done + sum(stats.waiting.values())


def test_a_webhook_gets_what_alertmanager_would_send(
    shop: Shop, hooks: Webhooks, tmp_path: Path
) -> None:
    """Firing and resolved, with labels, annotations and times."""
    url = hooks.address.replace("http://", "http://user:secret@")
    with shop.engine(rules_of(tmp_path), [url]) as engine:
        engine.start()
        fire(shop)
        hooks.wait([FIRING])
        resolve(shop)
        hooks.wait([FIRING, RESOLVED])
        until(lambda: engine.stats().sent == {hooks.address: 2})
        balance(engine)
    first, second = hooks.bodies
    assert (first["version"], first["status"], first["receiver"]) == ("4", "firing", "batchmill")
    assert first["groupLabels"] == {"alertname": "errors"}
    [alert] = first["alerts"]
    assert alert["labels"]["severity"] == "warning"
    assert alert["annotations"] == {"summary": "web: 80 %", "value": "80"}
    assert (alert["startsAt"], alert["endsAt"]) == ("2024-02-29T12:01:00Z", "0001-01-01T00:00:00Z")
    [ended] = second["alerts"]
    assert (ended["startsAt"], ended["endsAt"]) == ("2024-02-29T12:01:00Z", "2024-02-29T12:02:00Z")
    assert ended["fingerprint"] == alert["fingerprint"]
    assert hooks.headers[0]["Authorization"] == "Basic dXNlcjpzZWNyZXQ="


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_failed_request_is_tried_again(
    shop: Shop, hooks: Webhooks, tmp_path: Path, status: int
) -> None:
    """Until it is accepted; each try is counted."""
    hooks.answers = [status, status, status]
    with shop.engine(rules_of(tmp_path), [hooks.address]) as engine:
        engine.start()
        fire(shop)
        hooks.wait([FIRING])
        until(lambda: engine.stats().requests.get("HTTP 200"))
        stats = engine.stats()
        assert stats.requests == {f"HTTP {status}": 3, "HTTP 200": 1}
        assert (stats.retries, stats.failing) == (3, {})
        balance(engine)


def test_a_refused_request_is_dropped_and_counted(
    shop: Shop, hooks: Webhooks, tmp_path: Path
) -> None:
    """Sending it again would not help; what comes after it is sent."""
    hooks.answers = [400]
    with shop.engine(rules_of(tmp_path), [hooks.address]) as engine:
        engine.start()
        fire(shop)
        until(lambda: engine.stats().dropped == {"refused: HTTP 400": 1})
        resolve(shop)
        hooks.wait([RESOLVED])
        until(lambda: engine.stats().sent == {hooks.address: 1})
        balance(engine)


def test_a_dead_receiver_holds_up_no_other(shop: Shop, hooks: Webhooks, tmp_path: Path) -> None:
    """Its notifications wait in the store, and its failure is reported."""
    dead = f"http://127.0.0.1:{free_port()}/hook"
    with shop.engine(rules_of(tmp_path), [dead, hooks.address], close_timeout_s=0.1) as engine:
        engine.start()
        fire(shop)
        hooks.wait([FIRING])
        until(lambda: dead in engine.stats().failing)
        assert "unreachable" in engine.stats().failing[dead]
        assert engine.stats().waiting[dead] == 1
    assert shop.store.notifications_waiting() == {dead: 1}


def test_what_waited_is_sent_by_the_next_process(
    shop: Shop, hooks: Webhooks, tmp_path: Path
) -> None:
    """Nothing that was not sent is forgotten."""
    with shop.engine(rules_of(tmp_path), [hooks.address]) as engine:
        fire(shop)
        engine.evaluate()  # and ends before it has sent anything
    assert hooks.bodies == []
    with shop.engine(rules_of(tmp_path), [hooks.address]) as engine:
        engine.start()
        hooks.wait([FIRING])
        until(lambda: shop.store.notifications_waiting() == {})


def test_a_crash_between_sending_and_recording_repeats_the_same(
    shop: Shop, hooks: Webhooks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At least once: the same labels and the same start, by which it is known again."""
    rules = rules_of(tmp_path)
    with shop.engine(rules, [hooks.address]) as engine:
        fire(shop)
        engine.evaluate()
        with monkeypatch.context() as patch:

            def crash(seqs: object) -> None:
                raise KeyboardInterrupt

            patch.setattr(shop.store, "settle_notifications", crash)
            with pytest.raises(KeyboardInterrupt):
                engine.senders[0].send_waiting()
    with shop.engine(rules, [hooks.address]) as engine:
        assert engine.senders[0].send_waiting()
    first, second = hooks.bodies
    assert first == second


def test_alerts_of_one_rule_share_a_request(shop: Shop, hooks: Webhooks, tmp_path: Path) -> None:
    """Those of another rule have their own, as a body is about one name."""
    text = ERRORS + ERRORS.replace('"errors"', '"others"')
    with shop.engine(rules_of(tmp_path, text), [hooks.address]) as engine:
        shop.minute(0, web=BAD, cart=BAD)
        shop.minute(1, web=GOOD)
        shop.over(0)
        engine.evaluate()
        assert engine.senders[0].send_waiting()
    names = [(body["commonLabels"]["alertname"], len(body["alerts"])) for body in hooks.bodies]
    assert names == [("errors", 2), ("others", 2)]


def test_addresses() -> None:
    """What is shown has no login and no query; what is no address is refused."""
    hook = Receiver.parse("https://user:pw@host/path?token=secret")
    assert hook.key.startswith("https://host/path#")
    assert (hook.port, hook.path, hook.tls) == (443, "/path?token=secret", True)
    manager = Receiver.parse("alertmanager+http://host:9093/prefix/")
    assert (manager.is_alertmanager, manager.path) == (True, "/prefix/api/v2/alerts")
    for url in ("ftp://host", "http://", "http://host:99999", "alertmanager://host", "host:80"):
        with pytest.raises(ConfigError, match="alertmanager\\+http"):
            Receiver.parse(url)


def test_a_real_alertmanager_takes_firing_and_resolved(tmp_path: Path, hooks: Webhooks) -> None:
    """It shows the alert with our start, hands it on once, and again when it is resolved."""
    with (
        running_alertmanager(tmp_path / "alertmanager", hooks.address) as manager,
        open_store(f"sqlite:///{tmp_path}/store.db") as store,
    ):
        shop = Shop(store)
        # The alert fires in the past: until when it does is by the clock of today.
        engine = AlertEngine(
            store,
            rules_of(tmp_path),
            [Receiver.parse(manager.address)],
            shop.engine(rules_of(tmp_path), resend_s=0.05).settings,
        )
        with engine:
            engine.start()
            fire(shop)
            until(lambda: manager.alerts())
            [alert] = manager.alerts()
            assert alert["labels"]["entity"] == "web"
            assert alert["startsAt"] == "2024-02-29T12:01:00.000Z"
            assert alert["annotations"]["summary"] == "web: 80 %"
            hooks.wait([FIRING])
            # It is told again and again what fires, and takes it for the same alert.
            before = engine.stats().requests["HTTP 200"]

            def has_resent() -> bool:
                engine.senders[0].wake()
                return engine.stats().requests["HTTP 200"] > before + 2

            until(has_resent)
            assert len(manager.alerts()) == 1
            resolve(shop)
            hooks.wait([FIRING, RESOLVED])
            until(lambda: not manager.alerts())
        assert engine.stats().dropped == {}


def test_an_alertmanager_that_is_restarted_hears_again_what_fires(tmp_path: Path) -> None:
    """It has lost its memory, and a notification would not be repeated."""
    port = free_port()
    with open_store(f"sqlite:///{tmp_path}/store.db") as store:
        shop = Shop(store)
        settings = shop.engine((), resend_s=0.05).settings
        to = Receiver.parse(f"alertmanager+http://127.0.0.1:{port}")
        with AlertEngine(store, rules_of(tmp_path), [to], settings) as engine:
            engine.start()
            fire(shop)
            for name in ("first", "second"):
                with running_alertmanager(tmp_path / name, port=port) as manager:

                    def has_it() -> bool:
                        engine.senders[0].wake()
                        return len(manager.alerts()) == 1

                    until(has_it)
            assert engine.stats().sent == {to.key: 1}


def test_sigkill_loses_and_repeats_nothing(tmp_path: Path, hooks: Webhooks) -> None:
    """A process that is killed while its receiver is down leaves everything to the next one."""
    url = f"sqlite:///{tmp_path}/store.db"
    port = free_port()
    (tmp_path / "alerts.toml").write_text(ERRORS)
    with open_store(url) as store:
        shop = Shop(store)
        fire(shop)

        def start(to: str) -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                [
                    *(sys.executable, "-m", "batchmill", "alerts", "run", f"--store={url}"),
                    *(f"--rules={tmp_path / 'alerts.toml'}", f"--to={to}", "--poll=0.05"),
                ],
                env={**os.environ},
            )

        process = start(f"http://127.0.0.1:{port}/hook")
        try:
            until(lambda: store.notifications_waiting())
        finally:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        assert [alert.entity_name for alert in store.alerts().alerts] == ["web"]
        with Webhooks(port) as late:
            process = start(f"http://127.0.0.1:{port}/hook")
            try:
                late.wait([FIRING])
                resolve(shop)
                late.wait([FIRING, RESOLVED])
                until(lambda: not store.notifications_waiting())
            finally:
                process.terminate()
                assert process.wait() == 0
        [episode] = store.alert_episodes(START_S, ends(5))
        assert (episode.starts_s, episode.ends_s) == (ends(0), ends(1))
