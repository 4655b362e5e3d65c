"""The consumer of remote write's queue: samples to requests, each tried until it is answered."""

from __future__ import annotations

import itertools
import json
import logging
import random
import threading
from pathlib import Path

from batchmill.errors import ConfigError
from batchmill.export.prometheus.series import minutes_before
from batchmill.export.remote_write.client import (
    ANOTHER_VALUE,
    Outcome,
    RemoteWriteClient,
    Sample,
    WriteResult,
    encode,
)
from batchmill.export.remote_write.stats import RemoteWriteSettings, StatsRecorder
from batchmill.files import write_json
from batchmill.wording import count_of

log = logging.getLogger("batchmill.export")

_MAX_REQUESTS = 64
"""That one request which was refused is cut into: enough to find a few samples among thousands."""
_MAX_REFUSALS = 16
"""After so many refusals and nothing taken it is not some samples, it is all of them."""
_TAKES_LATE = (
    "Prometheus takes such samples if storage.tsdb.out_of_order_time_window is set in its "
    "configuration"
)


class PositionFile:
    """The last minute that is done: sent, or refused for good. A restart goes on behind it.

    Where minutes were skipped, also the last one before that: the clock may have been wrong.
    The file belongs to one store and one receiver.
    """

    def __init__(self, path: Path, store_id: str, url: str) -> None:
        self._path = path
        self._owner = {"store": store_id, "to": url}
        self.minute, self._before_gap = self._read()

    def save(self, minute: int) -> None:
        """Note that a minute is done; in this process also if that cannot be written."""
        last = self.minute
        if last is not None and minute < last:
            self._before_gap = None
        elif last is not None and minute > minutes_before(last, -1):
            self._before_gap = last
        self.minute = minute
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        content: dict[str, object] = {**self._owner, "minute": minute}
        if self._before_gap is not None:
            content["before_gap"] = self._before_gap
        write_json(self._path, content, durable=True)

    def last_until(self, minute: int) -> int | None:
        """The last minute that is done and not after that one; None if that is not known."""
        known = [self.minute, self._before_gap]
        return max((done for done in known if done is not None and done <= minute), default=None)

    def _read(self) -> tuple[int | None, int | None]:
        try:
            content = json.loads(self._path.read_text())
            minute = int(content["minute"])
            before_gap = content.get("before_gap")
            before_gap = None if before_gap is None else int(before_gap)
            owner = {name: content[name] for name in self._owner}
        except FileNotFoundError:
            return None, None
        except (ValueError, LookupError, TypeError) as error:
            raise ConfigError(
                "position", str(self._path), f"a file that remote write made ({error!r}): remove it"
            ) from error
        if owner != self._owner:
            raise ConfigError(
                "position",
                str(self._path),
                f"of the same store and receiver, and it is of {owner['store']} and {owner['to']}: "
                "name another file, or remove it to begin with the newest minute",
            )
        return minute, before_gap


class SampleSender:
    """Sends the samples that it is given, in order. Called by one thread at a time."""

    def __init__(
        self,
        client: RemoteWriteClient,
        position: PositionFile,
        settings: RemoteWriteSettings,
        recorder: StatsRecorder,
        url: str,
    ) -> None:
        self._client = client
        self._position = position
        self._settings = settings
        self._recorder = recorder
        self._url = url
        self._giving_up = threading.Event()
        self._gave_up_some = False
        """Whether samples of a minute were given up: then no minute from there on is done."""

    def give_up(self) -> None:
        """Try nothing again from now on; what is not sent stays unsent."""
        self._giving_up.set()
        self._client.interrupt()

    def consume(self, batch: list[Sample]) -> None:
        """Send the samples of each minute, late ones apart, and note the minutes that end."""
        for (minute, late, is_end), samples in itertools.groupby(
            batch, key=lambda sample: (sample.minute, sample.late, sample.labels is None)
        ):
            if is_end:
                self._end_minute(minute)
            else:
                self._deliver(minute, list(samples), late)

    def on_shutdown(self) -> None:
        """After the last batch."""
        self._client.close()

    def _end_minute(self, minute: int) -> None:
        # Between two minutes the receiver may well close the connection: it is made anew.
        self._client.close()
        if self._gave_up_some:
            return  # the next process begins with the minute that was given up
        self._recorder.add(minutes=1)
        try:
            self._position.save(minute)
        except OSError as error:
            if self._recorder.fault("position not written") == 1:
                log.warning("remote write cannot store its position: %s", error)

    def _deliver(self, minute: int, samples: list[Sample], late: bool) -> None:
        """Send samples; where some are refused, the others all the same.

        A receiver refuses a whole request because of one sample, so that is cut in halves.
        """
        waiting = [samples]
        requests = taken = refused = 0
        refusals: list[WriteResult] = []
        while waiting:
            part = waiting.pop()
            try:
                result = self._send(minute, part)
            except Exception:  # whatever it is, the samples are not sent, and are not forgotten
                result = None
                if self._recorder.fault("sending failed") == 1:
                    log.exception("remote write cannot send samples of %d", minute)
            if result is None:
                self._gave_up_some |= not late
                self._recorder.add(unsent=len(part) + sum(len(other) for other in waiting))
                break
            requests += 1
            if result.outcome is Outcome.SENT:
                taken += len(part)
                continue
            may_help = requests < _MAX_REQUESTS and (taken or requests < _MAX_REFUSALS)
            if result.of_some and len(part) > 1 and may_help:
                half = len(part) // 2
                waiting += [part[half:], part[:half]]  # the last one comes first: in order
                continue
            self._recorder.refuse(result.reason, len(part))
            refused += len(part)
            refusals.append(result)
        if refusals:
            log.warning(
                "%s refused %s of %d for good, and took %d (%s %s): they are not sent again",
                *(self._url, count_of(refused, "sample"), minute, taken),
                *(refusals[0].answer, refusals[0].text),
            )
            # Who has another value for that very time may still take others.
            other_values = all(refusal.reason == ANOTHER_VALUE for refusal in refusals)
            if late and not taken and not other_values:
                self._stop_late()

    def _send(self, minute: int, samples: list[Sample]) -> WriteResult | None:
        """Send samples until they are taken, or refused for good; None: no time is left."""
        body = encode(samples)
        for attempt in itertools.count(1):
            if self._giving_up.is_set():
                return None
            result = self._client.post(body)
            failed = result.outcome is Outcome.FAILED
            self._recorder.request(result.answer, failed=failed)
            if not failed:
                break
            if attempt == 1:
                log.warning(
                    "%s did not take the samples of %d (%s %s): trying again, later each time",
                    *(self._url, minute, result.answer, result.text),
                )
            pause_s = self._settings.pause_s(attempt, result.retry_after_s, random.random())
            self._giving_up.wait(pause_s)
        if result.outcome is Outcome.SENT:
            self._recorder.add(sent=len(samples), bytes_sent=len(body))
            if attempt > 1:
                log.warning("%s takes samples again, after %d tries", self._url, attempt)
        return result

    def _stop_late(self) -> None:
        if not self._recorder.late_refused:
            self._recorder.late_refused = True
            log.warning(
                "%s takes no samples that come late: no more of them are sent. %s",
                *(self._url, _TAKES_LATE),
            )
