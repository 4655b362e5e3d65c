"""Sends the notifications that wait in the store, one thread for each receiver."""

from __future__ import annotations

import itertools
import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from batchmill.alerts.receivers import Receiver, deliver, firing_content
from batchmill.alerts.stats import AlertSettings, StatsRecorder
from batchmill.errors import BatchmillError
from batchmill.store import Notification, Store, StoredAlert
from batchmill.wording import count_of

log = logging.getLogger("batchmill.alerts")

_IDLE_S = 5.0
"""How often the store is asked without a call of wake(): another process may have put some in."""


class NotificationSender:
    """Sends what waits for one receiver, in order, on a thread of its own.

    At least once: a notification is removed from the store after it was accepted. If the process
    ends in between it is sent again, with the same labels and the same start.
    """

    def __init__(
        self,
        store: Store,
        receiver: Receiver,
        settings: AlertSettings,
        recorder: StatsRecorder,
        firing: Callable[[], Sequence[StoredAlert]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``firing`` are the alerts that receivers know to be firing."""
        self._store = store
        self.receiver = receiver
        self._settings = settings
        self._recorder = recorder
        self._firing = firing
        self._clock = clock
        self._client = receiver.connect(settings.timeout_s)
        self._awake = threading.Event()
        self._closing = threading.Event()
        self._giving_up = threading.Event()
        self._idle = threading.Event()
        self._failures = 0
        self._resend_due_s = 0.0
        self._thread = threading.Thread(target=self._run, name="batchmill-alerts-sender")

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def wake(self) -> None:
        """There is something new to send."""
        self._idle.clear()
        self._awake.set()

    def close(self, deadline_s: float) -> None:
        """Send what waits until a moment of the monotonic clock, then end."""
        self._closing.set()
        self._awake.set()
        self._idle.wait(max(0.0, deadline_s - time.monotonic()))
        self._giving_up.set()
        self._awake.set()
        self._client.interrupt()
        self._thread.join()
        self._client.close()

    def _run(self) -> None:
        while not self._giving_up.is_set():
            self._awake.clear()
            pause_s = _IDLE_S
            try:
                if self.send_waiting():
                    self._resend()
                    self._idle.set()
                    if self._closing.is_set():
                        return
                else:
                    pause_s = self._pause_s
            except BatchmillError as error:
                if self._recorder.add("store_faults") == 1:
                    log.warning("notifications cannot be read, and are tried again: %s", error)
            except Exception:
                self._recorder.add("store_faults")
                log.exception("sending to %s failed, and is tried again", self.receiver.key)
            if self._failures:
                # wake() does not shorten a back-off; close() does.
                self._giving_up.wait(pause_s)
            else:
                self._awake.wait(pause_s)

    def send_waiting(self) -> bool:
        """Send all that waits; False if the receiver does not accept it now."""
        while not self._giving_up.is_set():
            waiting = self._store.notifications(
                self.receiver.key, limit=self._settings.max_batch + 1
            )
            if not waiting:
                return True
            # A webhook's body is about the alerts of one name.
            _, group = next(itertools.groupby(waiting[: self._settings.max_batch], key=self._group))
            if not self._send(list(group)):
                return False
        return True

    def _group(self, notification: Notification) -> Any:
        return "" if self.receiver.is_alertmanager else notification.content["labels"]["alertname"]

    def _send(self, notifications: list[Notification]) -> bool:
        contents = [notification.content for notification in notifications]
        delivery = self._post(contents)
        key, count = self.receiver.key, len(notifications)
        if not delivery.taken and not delivery.refused:
            why = f"{delivery.answer} {delivery.text}".strip()
            self._recorder.request(key, delivery.answer, 0, failed=why)
            self._failures += 1
            self._pause_s = self._settings.pause_s(
                self._failures, delivery.retry_after_s, random.random()
            )
            if self._failures == 1:
                log.warning("%s did not take notifications (%s): trying again", key, why)
            return False
        self._recorder.request(key, delivery.answer, count if delivery.taken else 0)
        if self._failures:
            log.warning("%s answers again, after %s", key, count_of(self._failures, "failure"))
            self._failures = 0
        if delivery.refused:
            self._recorder.drop(key, f"refused: {delivery.answer}", count)
            log.warning(
                "%s refused %s for good (%s %s): not sent again",
                *(key, count_of(count, "notification"), delivery.answer, delivery.text),
            )
        self._store.settle_notifications([notification.seq for notification in notifications])
        return True

    _pause_s = _IDLE_S

    def _post(self, contents: Sequence[Any]) -> Any:
        until_s = self._clock() + self._settings.active_s
        return deliver(self._client, self.receiver.body(contents, until_s))

    def _resend(self) -> None:
        """Tell an Alertmanager again what fires, so that it does not take it for resolved."""
        if not self.receiver.is_alertmanager or time.monotonic() < self._resend_due_s:
            return
        self._resend_due_s = time.monotonic() + self._settings.resend_s
        alerts = list(self._firing())
        for start in range(0, len(alerts), self._settings.max_batch):
            some = alerts[start : start + self._settings.max_batch]
            delivery = self._post([firing_content(alert) for alert in some])
            failed = "" if delivery.taken else f"{delivery.answer} {delivery.text}".strip()
            self._recorder.request(self.receiver.key, delivery.answer, 0, failed=failed)
