"""The consumer of remote write's queue: samples to requests, each tried until it is answered."""

from __future__ import annotations

import itertools
import logging
import random
import threading
from dataclasses import dataclass

from batchmill.export.prometheus.series import Labels
from batchmill.export.remote_write.http import ANOTHER_VALUE, Answer, Connection
from batchmill.export.remote_write.position import Position
from batchmill.export.remote_write.proto import encode
from batchmill.export.remote_write.stats import RemoteWriteSettings, Tally

log = logging.getLogger("batchmill.export")

_MOST_REQUESTS = 64
"""That one request which was refused is cut into: enough to find a few samples among thousands."""
_IN_VAIN = 16
"""After so many refusals and nothing taken it is not some samples, it is all of them."""
_TAKES_LATE = (
    "Prometheus takes such samples if storage.tsdb.out_of_order_time_window is set in its "
    "configuration"
)


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
        """Send samples; where some are refused, the others all the same.

        A receiver refuses a whole request because of one sample, so that is cut in halves.
        """
        waiting = [run]
        requests = taken = 0
        refused: list[tuple[int, Answer]] = []
        while waiting:
            some = waiting.pop()
            try:
                answer = self._answered(minute, some)
            except Exception:  # whatever it is, the samples are not sent, and are not forgotten
                answer = None
                if self._tally.fault("sending failed") == 1:
                    log.exception("remote write cannot send samples of %d", minute)
            if answer is None:
                left = len(some) + sum(len(each) for each in waiting)
                self._left_some |= not late
                self._tally.add(unsent=left)
                break
            requests += 1
            if answer.outcome == "sent":
                taken += len(some)
                continue
            worth = taken or requests < _IN_VAIN
            if answer.of_some and len(some) > 1 and requests < _MOST_REQUESTS and worth:
                half = len(some) // 2
                waiting += [some[half:], some[:half]]  # the last one comes first: in order
                continue
            self._tally.refuse(answer.reason, len(some))
            refused.append((len(some), answer))
        if refused:
            self._tell(minute, refused, late, taken)

    def _answered(self, minute: int, run: list[Item]) -> Answer | None:
        """Send samples until they are taken, or refused for good; None: no time is left."""
        body = encode((each.labels or (), each.value, each.at_ms) for each in run)
        for attempt in itertools.count(1):
            if self._giving_up.is_set():
                return None
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
            self._tally.add(sent=len(run), bytes_sent=len(body))
            if attempt > 1:
                log.warning("%s takes samples again, after %d tries", self._url, attempt)
        return answer

    def _tell(self, minute: int, refused: list[tuple[int, Answer]], late: bool, taken: int) -> None:
        count = sum(each for each, _ in refused)
        answer = refused[0][1]
        log.warning(
            "%s refused %d samples of %d for good, and took %d (%s %s): they are not sent again",
            *(self._url, count, minute, taken, answer.why, answer.said),
        )
        # Who has another value for that very time may still take others.
        none = not taken and any(each.reason != ANOTHER_VALUE for _, each in refused)
        if late and none and not self._tally.late_refused:
            self._tally.late_refused = True
            log.warning(
                "%s takes nothing of what comes late: no more of it is sent. %s",
                *(self._url, _TAKES_LATE),
            )
