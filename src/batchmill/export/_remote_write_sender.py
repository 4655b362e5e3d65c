"""The consumer of remote write's queue: samples to requests, each tried until it is answered."""

from __future__ import annotations

import itertools
import logging
import random
import threading
from dataclasses import dataclass

from batchmill.export._remote_write_http import Answer, Connection
from batchmill.export._remote_write_position import Position
from batchmill.export._remote_write_proto import encode
from batchmill.export._remote_write_stats import RemoteWriteSettings, Tally
from batchmill.export._series import Labels

log = logging.getLogger("batchmill.export")


@dataclass(frozen=True, slots=True)
class Item:
    """What lies in the queue: one sample; or, without labels, that a minute is whole.

    One class for both, as a queue keeps the order of one class.
    """

    minute: int
    at_ms: int = 0
    labels: Labels | None = None
    value: float = 0.0
    late: bool = False


class Sender:
    """Sends what it is given, in order. Called by one thread at a time."""

    def __init__(
        self,
        connection: Connection,
        position: Position,
        settings: RemoteWriteSettings,
        tally: Tally,
        url: str,
    ) -> None:
        self._connection = connection
        self._position = position
        self._settings = settings
        self._tally = tally
        self._url = url
        self._giving_up = threading.Event()
        self._left_some = False
        """Whether samples of a minute were given up: then no minute from there on is done with."""

    def give_up(self) -> None:
        """Try nothing again from now on; what is not sent stays unsent."""
        self._giving_up.set()
        self._connection.abort()

    def consume(self, batch: list[Item]) -> None:
        """Send the samples of each minute, late ones apart, and note the minutes that are whole."""
        for (minute, late, whole), run in itertools.groupby(
            batch, key=lambda each: (each.minute, each.late, each.labels is None)
        ):
            if whole:
                self._done(minute)
            else:
                self._deliver(minute, list(run), late)

    def on_shutdown(self) -> None:
        """After the last batch."""
        self._connection.close()

    def _done(self, minute: int) -> None:
        # Between two minutes the receiver may well close the connection: it is made anew.
        self._connection.close()
        if self._left_some:
            return  # the next process begins with the minute that was given up
        self._tally.add(minutes=1)
        try:
            self._position.save(minute)
        except OSError as error:
            if self._tally.fault("position not written") == 1:
                log.warning("how far remote write has come cannot be written down: %s", error)
            self._position.minute = minute

    def _deliver(self, minute: int, run: list[Item], late: bool) -> None:
        count = len(run)
        body = encode((each.labels or (), each.value, each.at_ms) for each in run)
        for attempt in itertools.count(1):
            if self._giving_up.is_set():
                self._left_some |= not late
                self._tally.add(unsent=count)
                return
            answer = self._connection.post(body)
            self._tally.request(answer.why)
            self._tally.is_failing(answer.why if answer.outcome == "failed" else "")
            if answer.outcome != "failed":
                break
            self._tally.add(retries=1)
            pause_s = self._settings.pause_s(attempt, answer.retry_after_s, random.random())
            if attempt == 1:
                log.warning(
                    "%s did not take the samples of %d (%s %s): tried again, later each time",
                    *(self._url, minute, answer.why, answer.said),
                )
            self._giving_up.wait(pause_s)
        if answer.outcome == "sent":
            self._tally.add(sent=count, bytes_sent=len(body))
            if attempt > 1:
                log.warning("%s takes samples again, after %d tries", self._url, attempt)
        else:
            self._refused(minute, count, late, answer)

    def _refused(self, minute: int, count: int, late: bool, answer: Answer) -> None:
        self._tally.add(refused=count)
        if late:
            self._tally.late_refused = True
            log.warning(
                "%s refused %d values that late rows have changed (%s %s): no more of them are "
                "sent, and it keeps what it had of those minutes",
                *(self._url, count, answer.why, answer.said),
            )
        else:
            log.warning(
                "%s refused %d samples of %d for good (%s %s): they are not sent again",
                *(self._url, count, minute, answer.why, answer.said),
            )
