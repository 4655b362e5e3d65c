"""Follows a store: evaluates alert rules on every closed minute, and has notifications sent.

* A minute is closed when a later one is committed and it is over for ``grace_s``. Each is evaluated
  once, in order; the minutes before it that a rule looks at are read anew each time, so rows that
  come late count from the next evaluation on. What was sent is never taken back.
* What a minute changes (positions, states, history, notifications) is one transaction, which checks
  that the positions are what they were. So a restart neither forgets nor repeats, and of two
  processes on one store one evaluates a minute.
* The store is read and written beside the pipeline, which waits for none of this.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta

from batchmill.alerts.evaluation import (
    MINUTE_S,
    Message,
    Occasion,
    Step,
    episode,
    rewind,
    take_step,
)
from batchmill.alerts.receivers import Receiver, content_of
from batchmill.alerts.rules import NoData, Rule
from batchmill.alerts.sender import NotificationSender
from batchmill.alerts.stats import ALERTS, FULL, GONE, AlertSettings, AlertStats, StatsRecorder
from batchmill.alerts.values import evaluate
from batchmill.errors import BatchmillError
from batchmill.lifecycle import Closing
from batchmill.sources import Grain, bucket_end, bucket_start
from batchmill.store import (
    AlertChange,
    AlertPhase,
    Notification,
    Store,
    StoredAlert,
    StoredAlertRule,
)
from batchmill.telemetry import register
from batchmill.wording import count_of

log = logging.getLogger("batchmill.alerts")

_DAY_S = 86_400
_STEP_S = 3_600
"""Smaller errors of the clock are waited out."""


class AlertEngine(Closing):
    """Evaluates rules on a store and notifies receivers, on threads of its own, until closed.

    The store is the caller's, and is closed by them after the engine. :meth:`start` begins; without
    it, :meth:`evaluate` does one turn.
    """

    kind = ALERTS
    name = "alerts"

    def __init__(
        self,
        store: Store,
        rules: Iterable[Rule],
        receivers: Iterable[Receiver] = (),
        settings: AlertSettings | None = None,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.settings = settings or AlertSettings()
        self.rules = tuple(rules)
        self._store = store
        self._clock = clock
        self._recorder = StatsRecorder()
        self._ending = threading.Event()
        self._lock = threading.Lock()
        """Held while the alerts and positions below are replaced."""
        self._positions: dict[str, int] = {}
        """By rule id, the last minute that was evaluated."""
        self._alerts: dict[str, dict[str, StoredAlert]] = {}
        """By rule id and entity id."""
        self._left: dict[str, int] = {}
        """By rule id, the minute that it went back from, as one still to come."""
        self._loaded = self._took_over = False
        self._next_rules: tuple[Rule, ...] | None = None
        """Rules that replace the present ones before the next evaluation."""
        self._rules_fault = ""
        self._faults: dict[str, str] = {}
        self._lag_s = 0.0
        self._newest: int | None = None
        self.senders = [
            NotificationSender(store, receiver, self.settings, self._recorder, self.notified, clock)
            for receiver in {receiver.key: receiver for receiver in receivers}.values()
        ]
        self._thread = threading.Thread(target=self._follow, name="batchmill-alerts")
        self._registration = register(self)

    def start(self) -> None:
        """Evaluate and send until closed."""
        for sender in self.senders:
            sender.start()
        self._thread.start()

    def close(self) -> None:
        """Evaluate no further minute, and send what waits, for a while; the rest stays stored."""
        self._ending.set()
        if self._thread.ident is not None:
            self._thread.join()
            deadline_s = time.monotonic() + self.settings.close_timeout_s
            for sender in self.senders:
                sender.close(deadline_s)
        self._registration.close(self)

    def replace_rules(self, rules: Iterable[Rule]) -> None:
        """Evaluate these rules from the next evaluation on, instead of the present ones.

        A rule keeps its state by its name; alerts of rules that are gone are resolved.
        """
        rules = tuple(rules)
        with self._lock:
            self._next_rules = rules
            self._rules_fault = ""
        self._recorder.reload("loaded")
        log.info("loaded %s: they apply from the next evaluation on", count_of(len(rules), "rule"))

    def refuse_rules(self, why: str) -> None:
        """Report that new rules cannot be used; the present ones stay."""
        with self._lock:
            self._rules_fault = why
        self._recorder.reload("refused")
        log.warning("the changed rules cannot be used, and the former ones stay: %s", why)

    def _follow(self) -> None:
        while not self._ending.is_set():
            try:
                self.evaluate()
            except BatchmillError as error:
                if self._recorder.add("store_faults") == 1:
                    log.warning("alerts cannot use the store, and try again: %s", error)
                self._loaded = False
            except Exception:  # whatever it is, the next try may well succeed
                self._recorder.add("store_faults")
                self._loaded = False
                log.exception("evaluating alerts failed, and is tried again")
            self._ending.wait(self.settings.poll_s)

    # Evaluating.

    def evaluate(self) -> int:
        """Evaluate the minutes that were closed since the last call; how many there were."""
        with self._lock:
            if self._next_rules is not None:
                self.rules, self._next_rules = self._next_rules, None
                self._loaded = False
        if not self._loaded:
            self._load()
        newest, now_s = self._store.newest_minute(), self._clock()
        self._newest = newest
        if newest is None:
            return 0
        over = last_minute_over(now_s - self.settings.grace_s)
        closed = min(minutes_before(newest, 1), over)
        # Without data, time goes on for rules that fire then.
        silent = max(closed, last_minute_over(now_s - self.settings.idle_s))
        ends = {rule.id: silent if rule.no_data is NoData.FIRING else closed for rule in self.rules}
        if not self._leave_future(ends, newest, now_s):
            return 0
        due: dict[int, list[Rule]] = {}
        for rule in self.rules:
            for minute in self._due_minutes(rule, ends[rule.id]):
                due.setdefault(minute, []).append(rule)
        done = 0
        trusted_s = self._store.clock().trusted_s if due else None
        for minute in sorted(due):
            if self._ending.is_set() or not self._evaluate_minute(minute, due[minute], trusted_s):
                break
            done += 1
        return done

    def _leave_future(self, ends: Mapping[str, int], newest: int, now_s: float) -> bool:
        """Go back from minutes still to come, which only a wrong clock can have closed.

        Such a rule goes on with the newest closed minute; what fires goes on to do so, and nobody
        is notified. False if another process was faster.
        """
        ahead = [
            (rule, position)
            for rule in self.rules
            if (position := self._positions.get(rule.id)) is not None
            and position > newest
            and _end_s(position) - now_s > _STEP_S
        ]
        if not ahead:
            return True
        resumed = {rule.id: minutes_before(ends[rule.id], 1) for rule, _ in ahead}
        steps = {
            rule.id: rewind(rule, self._alerts.get(rule.id, {}), _end_s(resumed[rule.id]))
            for rule, _ in ahead
        }
        change = AlertChange(
            expected={rule.id: position for rule, position in ahead},
            rules=[StoredAlertRule(rule.id, resumed[rule.id], rule.as_json()) for rule, _ in ahead],
            saved=[alert for step in steps.values() for alert in step.saved],
            episodes=[new for step in steps.values() for new in step.episodes],
        )
        if not self._write(change):
            return False
        self._recorder.add("future_positions", len(ahead))
        log.warning(
            "%s evaluated up to minute %d, which is in the future: a clock is or was wrong. "
            "Evaluation continues after minute %d",
            *(count_of(len(ahead), "rule"), max(position for _, position in ahead)),
            max(resumed.values()),
        )
        with self._lock:
            for rule, position in ahead:
                self._left[rule.id] = position
                self._positions[rule.id] = resumed[rule.id]
                alerts = self._alerts.setdefault(rule.id, {})
                alerts.update({alert.entity_id: alert for alert in steps[rule.id].saved})
        return True

    def _due_minutes(self, rule: Rule, end: int) -> list[int]:
        position = self._positions.get(rule.id)
        if position is None:  # a new rule begins with the newest closed minute
            return [end]
        behind = minutes_between(position, end)
        if behind <= 0:
            return []
        most = self.settings.catch_up_minutes
        left = self._left.get(rule.id, 0)
        if behind > most and position < left <= end:
            # The clock was behind and is right again: nothing is evaluated twice.
            behind = minutes_between(left, end)
        if behind > most:
            self._recorder.add("minutes_skipped", behind - most)
            log.warning(
                "the rule %s skips %s after a pause (catch_up_minutes is %d)",
                *(rule.id, count_of(behind - most, "minute"), most),
            )
            behind = most
        return [minutes_before(end, back) for back in range(behind - 1, -1, -1)]

    def _evaluate_minute(self, minute: int, rules: Sequence[Rule], trusted_s: float | None) -> bool:
        """Evaluate one minute of some rules; False if another process has done so."""
        result = self._store.read(lambda snapshot: evaluate(snapshot, rules, minute))
        at_s = _end_s(minute)
        # History is removed by a time that the store trusts.
        forgotten_s = at_s if trusted_s is None else min(at_s, int(trusted_s))
        steps: dict[str, Step] = {}
        for rule in rules:
            if rule.id not in result.faults:
                before = self._alerts.get(rule.id, {})
                outcomes = result.outcomes.get(rule.id, {})
                steps[rule.id] = take_step(rule, before, outcomes, at_s)
        self._note_faults(rules, result.faults)
        messages = [message for step in steps.values() for message in step.messages]
        change = AlertChange(
            expected={rule.id: self._positions.get(rule.id) for rule in rules},
            rules=[StoredAlertRule(rule.id, minute, rule.as_json()) for rule in rules],
            saved=[alert for step in steps.values() for alert in step.saved],
            deleted=[
                (alert.rule, alert.entity_id) for step in steps.values() for alert in step.deleted
            ],
            episodes=[new for step in steps.values() for new in step.episodes],
            notifications=self._notifications(messages),
            max_waiting=self.settings.max_waiting,
            forget_before_s=forgotten_s - self.settings.keep_days * _DAY_S,
        )
        if not self._write(change):
            return False
        with self._lock:
            for rule in rules:
                self._positions[rule.id] = minute
                step = steps.get(rule.id, Step())
                alerts = self._alerts.setdefault(rule.id, {})
                alerts.update({alert.entity_id: alert for alert in step.saved})
                for alert in step.deleted:
                    del alerts[alert.entity_id]
        self._lag_s = max(0.0, self._clock() - at_s)
        self._recorder.add("minutes")
        _log_messages(messages)
        return True

    def _note_faults(self, rules: Sequence[Rule], faults: dict[str, str]) -> None:
        for rule in rules:
            why = faults.get(rule.id)
            if why is None:
                self._faults.pop(rule.id, None)
            elif self._faults.get(rule.id) != why:
                self._faults[rule.id] = why
                log.warning("the rule %s cannot be evaluated: %s", rule.id, why)

    # State.

    def _load(self) -> None:
        """Read positions and states; what rules and receivers that are gone have left is ended."""
        waiting = {} if self._took_over else self._store.notifications_waiting()
        book = self._store.alerts()
        known = {rule.id for rule in self.rules}
        gone = [rule for rule in book.rules if rule not in known]
        if gone:
            self._end_rules(gone, [alert for alert in book.alerts if alert.rule not in known])
            book = self._store.alerts()
        self._take_over(waiting)
        self._faults = {id_: why for id_, why in self._faults.items() if id_ in known}
        with self._lock:
            self._positions = {id_: rule.minute for id_, rule in book.rules.items()}
            self._alerts = {}
            for alert in book.alerts:
                self._alerts.setdefault(alert.rule, {})[alert.entity_id] = alert
        self._loaded = True

    def _take_over(self, waiting: Mapping[str, int]) -> None:
        """Count unsent notifications of an earlier process; drop those of removed receivers."""
        self._took_over = True
        keys = {sender.receiver.key for sender in self.senders}
        for target, count in waiting.items():
            self._recorder.queue(target, count)
            if target not in keys:
                self._store.drop_notifications(target)
                self._recorder.drop(target, GONE, count)
                log.warning(
                    "dropped %s for %s, which is no receiver any more",
                    *(count_of(count, "notification"), target),
                )

    def _end_rules(self, gone: Sequence[str], alerts: Sequence[StoredAlert]) -> None:
        now_s = int(self._clock())
        firing = [alert for alert in alerts if alert.phase is AlertPhase.FIRING]
        messages = [
            Message(Occasion.RESOLVED, alert, max(now_s, alert.since_s))
            for alert in firing
            if alert.is_notified
        ]
        self._write(
            AlertChange(
                removed=gone,
                episodes=[
                    episode(alert.labels.get("severity", ""), alert, max(now_s, alert.since_s))
                    for alert in firing
                ],
                notifications=self._notifications(messages),
                max_waiting=self.settings.max_waiting,
            )
        )
        _log_messages(messages)

    def _write(self, change: AlertChange) -> bool:
        result = self._store.change_alerts(change)
        if not result.applied:
            log.warning("another process evaluates alerts on this store: reading its state")
            self._loaded = False
            return False
        for sender in self.senders if change.notifications else ():
            key = sender.receiver.key
            self._recorder.queue(key, sum(new.target == key for new in change.notifications))
            self._recorder.drop(key, FULL, result.dropped.get(key, 0))
            sender.wake()
        return True

    def _notifications(self, messages: Sequence[Message]) -> list[Notification]:
        return [
            Notification(0, sender.receiver.key, content_of(message))
            for message in messages
            for sender in self.senders
        ]

    def notified(self) -> list[StoredAlert]:
        """The alerts that receivers know to be firing."""
        with self._lock:
            return [
                alert
                for alerts in self._alerts.values()
                for alert in alerts.values()
                if alert.is_notified
            ]

    def firing(self) -> list[StoredAlert]:
        """The alerts that fire, the newest first."""
        with self._lock:
            alerts = [
                alert
                for of_rule in self._alerts.values()
                for alert in of_rule.values()
                if alert.phase is AlertPhase.FIRING
            ]
        return sorted(alerts, key=lambda alert: (-alert.since_s, alert.rule, alert.entity_id))

    def next_due_s(self) -> float | None:
        """In how many seconds the next minute is closed; None: no later one is committed yet."""
        with self._lock:
            position = max(self._positions.values(), default=None)
        newest = self._newest
        if position is None or newest is None or minutes_between(position, newest) < 2:
            return None
        closed_s = bucket_end(position).timestamp() + MINUTE_S + self.settings.grace_s
        return max(0.0, round(closed_s - self._clock(), 1))

    def stats(self) -> AlertStats:
        """All counters at one moment."""
        with self._lock:
            phases = [alert.phase for alerts in self._alerts.values() for alert in alerts.values()]
            minute = max(self._positions.values(), default=None)
            rules_fault = self._rules_fault
        return AlertStats(
            rules=len(self.rules),
            minute=minute,
            firing=phases.count(AlertPhase.FIRING),
            pending=phases.count(AlertPhase.PENDING),
            faults=dict(self._faults),
            rules_fault=rules_fault,
            lag_s=self._lag_s,
            **self._recorder.fields(),
        )


def last_minute_over(now_s: float) -> int:
    """The last minute that is over at a time.

    >>> last_minute_over(1_709_208_059.9), last_minute_over(1_709_208_060.0)
    (202402291159, 202402291200)
    """
    start = datetime.fromtimestamp(now_s // MINUTE_S * MINUTE_S - MINUTE_S, UTC)
    return Grain.MINUTE.bucket(start)


def minutes_before(minute: int, count: int) -> int:
    """The minute ``count`` minutes before another."""
    return Grain.MINUTE.bucket(bucket_start(minute) - timedelta(minutes=count))


def minutes_between(first: int, last: int) -> int:
    """How many minutes the last is behind the first; negative if it is before it."""
    return round((bucket_start(last) - bucket_start(first)).total_seconds() / MINUTE_S)


def _end_s(minute: int) -> int:
    """The end of a minute, in seconds since 1970."""
    return int(bucket_end(minute).timestamp())


def _log_messages(messages: Sequence[Message]) -> None:
    for message in messages:
        log.info("%s: %s", message.occasion.value, message.alert.message)
