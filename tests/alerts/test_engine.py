"""Rules on the minutes of a real store: which minutes, which entities, what a restart knows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from batchmill.alerts import AlertEngine
from batchmill.sources import endpoint_id, service_id
from batchmill.store import AlertPhase, open_store
from tests.alerts.kit import ERRORS, Shop, bucket, ends, firing, rules_of
from tests.kit.stores import Backend, downgrade
from tests.web.entities_kit import write_shop
from tests.web.kit import START_S, Call

BAD, GOOD = (8, 2), (10, 0)
WEB, CART = service_id("web", True), service_id("cart", True)


@pytest.fixture
def shop(backend: Backend) -> Iterator[Shop]:
    """An empty shop, on each database."""
    with backend.open() as store:
        yield Shop(store)


@pytest.fixture
def sqlite(tmp_path: Path) -> Iterator[Shop]:
    """An empty shop on one database, where it makes no difference."""
    place = Backend(f"sqlite:///{tmp_path}/store.db")
    with place.open() as store:
        yield Shop(store)


def test_a_rule_fires_and_is_resolved(shop: Shop, tmp_path: Path) -> None:
    """For the entity whose minute matches; history and state are in the store."""
    with shop.engine(rules_of(tmp_path)) as engine:
        shop.minute(0, web=BAD, cart=GOOD)
        shop.minute(1, web=GOOD, cart=GOOD)
        shop.over(0)
        assert engine.evaluate() == 1
        assert firing(engine) == [("errors", "web")]
        [alert] = shop.store.alerts().alerts
        assert (alert.entity_id, alert.phase, alert.value) == (WEB, AlertPhase.FIRING, 80)
        assert (alert.since_s, alert.message) == (ends(0), "web: 80 %")
        shop.minute(2, web=GOOD)
        shop.over(1)
        assert engine.evaluate() == 1
        assert firing(engine) == []
    [episode] = shop.store.alert_episodes(START_S, ends(9))
    assert (episode.rule, episode.entity_name, episode.severity) == ("errors", "web", "warning")
    assert (episode.starts_s, episode.ends_s) == (ends(0), ends(1))


def test_a_minute_is_closed_by_a_later_one_and_by_time(sqlite: Shop, tmp_path: Path) -> None:
    """Both are needed: a later minute is committed, and the grace is over."""
    with sqlite.engine(rules_of(tmp_path)) as engine:
        sqlite.minute(0, web=BAD)
        sqlite.minute(1, web=BAD)
        sqlite.over(0)
        assert engine.evaluate() == 1
        sqlite.over(1, 100)
        assert engine.evaluate() == 0, "no later minute"
        sqlite.minute(2, web=BAD)
        sqlite.over(1, 14)
        assert engine.evaluate() == 0, "within the grace"
        sqlite.over(1, 15)
        assert engine.evaluate() == 1
        assert engine.evaluate() == 0, "once is enough"


def test_minutes_are_evaluated_in_order_after_a_pause(sqlite: Shop, tmp_path: Path) -> None:
    """All that were closed meanwhile; those too far back are skipped, and counted."""
    rules = rules_of(tmp_path)
    with sqlite.engine(rules, catch_up_minutes=3) as engine:
        sqlite.minute(0, web=GOOD)
        sqlite.minute(1, web=GOOD)
        sqlite.over(0)
        engine.evaluate()
        for number in range(2, 8):
            sqlite.minute(number, web=BAD if number in (3, 5) else GOOD)
        sqlite.over(6)
        assert engine.evaluate() == 3
        assert engine.stats().minutes_skipped == 3
        assert engine.stats().minute == bucket(6)
    times = [
        (episode.starts_s, episode.ends_s) for episode in sqlite.store.alert_episodes(0, 2**40)
    ]
    assert times == [(ends(5), ends(6))]


def test_a_restart_neither_forgets_nor_repeats(shop: Shop, tmp_path: Path) -> None:
    """A second engine goes on with the states and the position of the first."""
    rules = rules_of(tmp_path)
    shop.minute(0, web=BAD)
    shop.minute(1, web=BAD)
    shop.over(0)
    url = "http://127.0.0.1:1/hook"
    with shop.engine(rules, [url]) as first:
        first.evaluate()
        assert first.stats().queued == 1
    shop.minute(2, web=GOOD)
    shop.minute(3, web=GOOD)
    shop.over(1)
    with shop.engine(rules, [url]) as second:
        assert second.evaluate() == 1
        assert firing(second) == [("errors", "web")]
        assert second.stats().queued == 1, "the one that waits; it was told before"
        shop.over(2)
        second.evaluate()
        assert second.stats().queued == 2
    waiting = [one.content["status"] for one in shop.store.notifications(url)]
    assert waiting == ["firing", "resolved"]
    starts = {one.content["startsAt"] for one in shop.store.notifications(url)}
    assert len(starts) == 1


def test_two_engines_on_one_store_evaluate_a_minute_once(shop: Shop, tmp_path: Path) -> None:
    """The slower one notices, reads the other's state and goes on with it."""
    rules = rules_of(tmp_path)
    url = "http://127.0.0.1:1/hook"
    with shop.engine(rules, [url]) as first, shop.engine(rules, [url]) as second:
        shop.minute(0, web=GOOD)
        shop.minute(1, web=BAD)
        shop.over(0)
        assert first.evaluate() == 1
        assert second.evaluate() == 0  # it has read the first one's position
        shop.minute(2, web=BAD)
        shop.over(1)
        assert first.evaluate() == 1
        second.evaluate()
        second.evaluate()
        assert firing(second) == [("errors", "web")]
        assert len(shop.store.notifications(url)) == 1


def test_a_failed_write_changes_nothing(
    sqlite: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The minute is evaluated again, with the same result."""
    with sqlite.engine(rules_of(tmp_path)) as engine:
        sqlite.minute(0, web=BAD)
        sqlite.minute(1, web=BAD)
        sqlite.over(0)
        with monkeypatch.context() as patch:

            def fail(change: object) -> None:
                raise OSError("no disk")

            patch.setattr(sqlite.store, "change_alerts", fail)
            with pytest.raises(OSError, match="no disk"):
                engine.evaluate()
        assert firing(engine) == []
        assert engine.evaluate() == 1
        assert firing(engine) == [("errors", "web")]


def test_late_rows_count_from_the_next_minute_on(sqlite: Shop, tmp_path: Path) -> None:
    """A minute is evaluated once, but the windows of later ones read it anew."""
    text = ERRORS + "period = 3\ncount = 2\n"
    with sqlite.engine(rules_of(tmp_path, text)) as engine:
        sqlite.minute(0, web=GOOD)
        sqlite.minute(1, web=GOOD)
        sqlite.over(0)
        engine.evaluate()
        sqlite.minute(0, web=(0, 10))  # late: now 50 %
        assert engine.evaluate() == 0
        sqlite.minute(1, web=(0, 10))
        sqlite.minute(2, web=GOOD)
        sqlite.over(1)
        assert engine.evaluate() == 1
        assert firing(engine) == [("errors", "web")]


def test_entities_are_included_and_excluded(sqlite: Shop, tmp_path: Path) -> None:
    """By name, by full name, by regular expression."""
    text = """
    rule = [
        {name = "a", expression = "service_cpm", comparison = "> 0", include = ["web"]},
        {name = "b", expression = "service_cpm", comparison = "> 0", exclude_regex = "w.*"},
        {name = "c", expression = "endpoint_cpm", comparison = "> 0", include = ["GET / in web"]},
        {name = "d", expression = "endpoint_cpm", comparison = "> 0", exclude = ["GET /"]},
    ]
    """
    with sqlite.engine(rules_of(tmp_path, text)) as engine:
        sqlite.minute(0, web=GOOD, cart=GOOD)
        sqlite.minute(1, web=GOOD)
        sqlite.over(0)
        engine.evaluate()
        assert firing(engine) == [("a", "web"), ("b", "cart"), ("c", "GET / in web")]
        ids = {alert.rule: alert.entity_id for alert in engine.firing()}
        assert ids["c"] == endpoint_id(WEB, "GET /")


def test_an_event_type_of_a_users_own(tmp_path: Path) -> None:
    """A rule on one of its metrics fires for the entity that matches, and for no other."""
    text = """
    rule = [{name = "cheap", expression = "ticket_cents", comparison = "< 1000"}]
    """
    url = f"sqlite:///{tmp_path}/store.db"
    write_shop(url, START_S, minutes=2)  # tickets cost 1200 in Berlin, 800 in Paris
    with open_store(url) as store:
        shop = Shop(store)
        shop.over(0)
        with shop.engine(rules_of(tmp_path, text)) as engine:
            assert engine.evaluate() == 1
            assert firing(engine) == [("cheap", "Paris")]
            [alert] = engine.firing()
    assert (alert.entity_id, alert.value) == (service_id("Paris", True), 800)


def test_percentiles_and_several_metrics(sqlite: Shop, tmp_path: Path) -> None:
    """Labelled metrics, and expressions over two metrics of one source."""
    text = """
    rule = [
        {name = "p99", expression = "service_percentile{p='99'}", comparison = ">= 100"},
        {name = "both", expression = "service_cpm * service_resp_time", comparison = "== 1000"},
        {name = "mqe", expression = "avg(service_cpm) == 10 && max(service_sla) == 10000"},
    ]
    """
    with sqlite.engine(rules_of(tmp_path, text)) as engine:
        sqlite.minute(0, web=GOOD)
        sqlite.minute(1, web=GOOD)
        sqlite.over(0)
        engine.evaluate()
        assert firing(engine) == [("both", "web"), ("mqe", "web"), ("p99", "web")]


def test_a_rule_that_cannot_be_evaluated_is_reported(sqlite: Shop, tmp_path: Path) -> None:
    """The others are evaluated."""
    text = """
    rule = [
        {name = "a", expression = "no_such_metric", comparison = "> 0"},
        {name = "b", expression = "service_cpm + endpoint_cpm", comparison = "> 0"},
        {name = "c", expression = "service_cpm", comparison = "> 0"},
    ]
    slo = [{name = "d", metric = "service_cpm", objective = 99}]
    """
    with sqlite.engine(rules_of(tmp_path, text)) as engine:
        sqlite.minute(0, web=GOOD)
        sqlite.minute(1, web=GOOD)
        sqlite.over(0)
        engine.evaluate()
        faults = engine.stats().faults
        assert "the store has no metric no_such_metric" in faults["a"]
        assert "Endpoint, Service" in faults["b"]
        assert "service_cpm is cpm(), and must be percent()" in faults["d/1h"]
        assert firing(engine) == [("c", "web")]


def test_an_entity_that_falls_silent(sqlite: Shop, tmp_path: Path) -> None:
    """Is resolved, fires, or stays as it is, as the rule has it."""
    text = """
    rule = [
        {name = "ok", expression = "service_sla", comparison = "< 9500"},
        {name = "keep", expression = "service_sla", comparison = "< 9500", no_data = "keep"},
        {name = "firing", expression = "service_cpm", comparison = "< 1", no_data = "firing"},
    ]
    """
    with sqlite.engine(rules_of(tmp_path, text)) as engine:
        sqlite.minute(0, web=BAD, cart=GOOD)
        sqlite.minute(1, cart=GOOD)
        sqlite.over(0)
        engine.evaluate()
        assert firing(engine) == [("keep", "web"), ("ok", "web")]
        sqlite.minute(2, cart=GOOD)
        sqlite.over(1)
        engine.evaluate()
        assert firing(engine) == [("firing", "web"), ("keep", "web")]


def test_time_goes_on_without_data_for_rules_that_fire_then(sqlite: Shop, tmp_path: Path) -> None:
    """When nothing at all is committed; other rules wait."""
    text = """
    rule = [
        {name = "ok", expression = "service_sla", comparison = "< 9500"},
        {name = "firing", expression = "service_cpm", comparison = "< 1", no_data = "firing"},
    ]
    """
    with sqlite.engine(rules_of(tmp_path, text), idle_s=180) as engine:
        sqlite.minute(0, web=BAD)
        sqlite.minute(1, web=BAD)
        sqlite.over(0)
        engine.evaluate()
        assert firing(engine) == [("ok", "web")]
        sqlite.over(2, 179)
        engine.evaluate()
        assert firing(engine) == [("ok", "web")]
        sqlite.over(2, 180)
        engine.evaluate()
        assert firing(engine) == [("firing", "web"), ("ok", "web")]


def test_an_slo_burns_in_both_windows(shop: Shop, tmp_path: Path) -> None:
    """A long window alone is not enough, nor is a short one."""
    text = """
    [[slo]]
    name = "good"
    metric = "service_sla"
    objective = 99
    windows = [{long = "2h", short = "5m", burn_rate = 5}]
    """
    with shop.engine(rules_of(tmp_path, text), catch_up_minutes=2) as engine:
        # Two hours and more, so that whole hours are read as hours. 10 % bad is a rate of 10.
        states = []
        shop.writer.write(
            [
                Call("web", START_S + 60 * number, ok=call > 0 or not 20 <= number < 120)
                for number in range(151)
                for call in range(10)
            ]
        )
        for number in (15, 40, 85, 119, 125, 149):
            shop.over(number)
            engine.evaluate()
            states.append((number, firing(engine)))
        assert states == [
            (15, []),
            (40, [("good/2h", "web")]),
            (85, [("good/2h", "web")]),
            (119, [("good/2h", "web")]),
            (125, []),  # the short window is good again
            (149, []),
        ]
        [alert] = shop.store.alerts().alerts
        assert alert.phase is AlertPhase.PENDING
        # 90 bad minutes of 120 in the last two hours, exactly.
        assert alert.value == pytest.approx(9000 / 12000 * 10)
        assert alert.labels["window"] == "2h"


def test_a_removed_rule_is_resolved(shop: Shop, tmp_path: Path) -> None:
    """Receivers are told, the episode ends, and no state stays."""
    shop.minute(0, web=BAD)
    shop.minute(1, web=BAD)
    shop.over(0)
    url = "http://127.0.0.1:1/hook"
    with shop.engine(rules_of(tmp_path), [url]) as engine:
        engine.evaluate()
    other = ERRORS.replace('"errors"', '"others"').replace("< 95", "< 5")
    with shop.engine(rules_of(tmp_path, other), [url]) as engine:
        engine.evaluate()
    book = shop.store.alerts()
    assert (list(book.rules), book.alerts) == (["others"], [])
    [episode] = shop.store.alert_episodes(0, 2**40)
    assert episode.ends_s == int(shop.now_s)
    waiting = [one.content["status"] for one in shop.store.notifications(url)]
    assert waiting == ["firing", "resolved"]


def test_waiting_notifications_are_bounded(shop: Shop, tmp_path: Path) -> None:
    """The oldest are dropped, and counted; so are those of a receiver that is gone."""
    url = "http://127.0.0.1:1/hook"
    rules = rules_of(tmp_path)
    with shop.engine(rules, [url], max_waiting=2) as engine:
        for number in range(5):
            shop.minute(number, web=GOOD if number % 2 else BAD)
        shop.minute(5, web=GOOD)
        shop.over(0)
        engine.evaluate()
        shop.over(4)
        engine.evaluate()
        stats = engine.stats()
        assert (stats.queued, stats.dropped) == (5, {"too many waiting": 3})
        statuses = [one.content["status"] for one in shop.store.notifications(url)]
        assert statuses == ["resolved", "firing"]
    with shop.engine(rules) as engine:
        engine.evaluate()
        assert engine.stats().dropped == {"receiver removed": 2}
        assert shop.store.notifications_waiting() == {}


def test_old_episodes_are_forgotten(sqlite: Shop, tmp_path: Path) -> None:
    """When they ended so many days ago."""
    with sqlite.engine(rules_of(tmp_path), keep_days=1) as engine:
        sqlite.minute(0, web=BAD)
        sqlite.minute(1, web=GOOD)
        sqlite.minute(2, web=GOOD)
        sqlite.over(1)
        engine.evaluate()
        assert engine.evaluate() == 0
        sqlite.minute(2000, web=GOOD)
        sqlite.minute(2001, web=GOOD)
        sqlite.over(2000)
        engine.evaluate()
        assert sqlite.store.alert_episodes(0, 2**40) == []


DAYS = 40 * 1440
"""Forty days, in minutes."""
FALLING_SILENT = """
[[rule]]
name = "errors"
expression = "service_sla / 100"
comparison = "< 95"
no_data = "firing"
"""


def _pass_minutes(shop: Shop, engine: AlertEngine, first: int, **services: tuple[int, int]) -> None:
    """Write three minutes as they pass, and evaluate those that are closed."""
    shop.steady_s = shop.steady_s or 0.0
    for number in range(first, first + 3):
        shop.over(number - 1)
        shop.minute(number, **services)
        engine.evaluate()
        shop.steady_s += 60


@pytest.mark.parametrize(
    ("text", "restart"), [(ERRORS, False), (FALLING_SILENT, True)], ids=["running", "restarted"]
)
def test_a_clock_that_was_ahead_silences_no_rule(
    sqlite: Shop, tmp_path: Path, text: str, restart: bool
) -> None:
    """Alerts fire and are resolved at the right time again, each once, and history stays."""
    rules, url = rules_of(tmp_path, text), "http://127.0.0.1:1/hook"
    engine = sqlite.engine(rules, [url])
    _pass_minutes(sqlite, engine, 0, web=BAD, cart=GOOD)
    _pass_minutes(sqlite, engine, 3, web=GOOD, cart=GOOD)
    past = sqlite.store.alert_episodes(0, 2**40)
    assert [(past[0].starts_s, past[0].ends_s)] == [(ends(0), ends(3))]
    _pass_minutes(sqlite, engine, DAYS, web=GOOD, cart=BAD)
    assert engine.stats().minute == bucket(DAYS + 1)
    assert firing(engine) == [("errors", "cart")]
    if restart:
        engine.close()
        engine = sqlite.engine(rules, [url])
    _pass_minutes(sqlite, engine, 6, web=BAD, cart=BAD)
    assert engine.stats().minute == bucket(7)
    assert engine.stats().future_positions == 1
    assert firing(engine) == [("errors", "cart"), ("errors", "web")]
    _pass_minutes(sqlite, engine, 9, web=GOOD, cart=GOOD)
    assert firing(engine) == []
    for entity in ("web", "cart"):
        contents = [one.content for one in sqlite.store.notifications(url)]
        of_it = [content["status"] for content in contents if content["labels"]["entity"] == entity]
        assert of_it == ["firing", "resolved"] * 2
    episodes = sqlite.store.alert_episodes(0, 2**40)
    assert past[0] in episodes
    assert all(episode.ends_s is not None for episode in episodes)
    engine.close()


def test_a_clock_that_was_behind_repeats_nothing(sqlite: Shop, tmp_path: Path) -> None:
    """While it is behind, its minutes are evaluated; then those that came before are not again."""
    rules, url = rules_of(tmp_path), "http://127.0.0.1:1/hook"
    with sqlite.engine(rules, [url]) as engine:
        _pass_minutes(sqlite, engine, 0, web=BAD)
        _pass_minutes(sqlite, engine, 3, web=GOOD)
        assert engine.stats().queued == 2
        _pass_minutes(sqlite, engine, -DAYS, web=BAD)
        assert firing(engine) == [("errors", "web")]
        assert engine.stats().queued == 3
        _pass_minutes(sqlite, engine, 6, web=GOOD)
        assert engine.stats().minute == bucket(7)
        assert engine.stats().queued == 4
        assert (engine.stats().future_positions, engine.stats().minutes_skipped) == (1, 0)
        assert len(sqlite.store.alert_episodes(0, 2**40)) == 2


def test_a_store_of_the_schema_before_gets_the_tables(backend: Backend, tmp_path: Path) -> None:
    """A store that an older batchmill made is migrated, with what is in it."""
    with backend.open() as store:
        shop = Shop(store)
        shop.minute(0, web=BAD)
        shop.minute(1, web=BAD)
        downgrade(store, 4)
    with backend.open() as store:
        shop.store = store
        shop.over(0)
        with shop.engine(rules_of(tmp_path)) as engine:
            engine.evaluate()
            assert firing(engine) == [("errors", "web")]


def test_composite_rules_of_skywalking(sqlite: Shop, tmp_path: Path) -> None:
    """Two rules that hold for the same service; one has its own names and period."""
    text = """
rules:
  sla_rule: {metrics-name: service_sla, op: "<", threshold: 9500, period: 2, count: 1,
             only-as-condition: true}
  load_rule: {metrics-name: service_cpm, op: ">=", threshold: 10, period: 1, count: 1,
              exclude-names: [cart], only-as-condition: true}
  slow_rule: {metrics-name: service_percentile, op: ">", threshold: "-,-,-,-,90", period: 1,
              count: 1, only-as-condition: true}
composite-rules:
  both_rule: {expression: sla_rule && load_rule}
  any_rule: {expression: (sla_rule && load_rule) || slow_rule}
"""
    rules = rules_of(tmp_path, text, "alarm-settings.yml")
    with sqlite.engine(rules) as engine:
        sqlite.writer.write([Call("slow", START_S, latency=200)])
        sqlite.minute(0, web=BAD, cart=BAD, mail=(1, 0))
        sqlite.minute(1, web=GOOD)
        sqlite.over(0)
        engine.evaluate()
        alerts = firing(engine)
    assert [name for rule, name in alerts if rule == "both_rule"] == ["web"]
    assert "slow" in [name for rule, name in alerts if rule == "any_rule"]
