"""Remote write 1.0: every complete minute of a store to a Prometheus, or whatever takes the same.

* A minute is sent once its successor has begun, in order, each value at the minute's end. A series
  that the minute before had and this one has not is ended by a stale marker.
* At least once: the position moves when a whole minute is answered. A restart sends again what was
  under way, which a receiver knows already with the same value, and goes on behind it. Without a
  position it begins with the newest complete minute, or at the start of a store that was empty.
  With a position from the future, it goes on behind the last minute before that.
* Bounded: the queue holds so many samples, and while it is full no further minute is read; the
  store keeps them meanwhile. After a pause, minutes that are too far back are skipped and counted.
* Late rows: the last minutes but the newest are read again, and what late rows have changed or
  added is sent, in requests of their own. A stock Prometheus refuses what is older than what it
  has of a series, and no more of it is sent then; with an ``out_of_order_time_window`` it takes it.

Commits never wait for any of this: the store is only read.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from batchmill import presets
from batchmill.errors import BatchmillError
from batchmill.export.prometheus.series import (
    DroppedSeriesLog,
    Labels,
    SeriesSelection,
    complete_minute,
    end_s,
    minutes_after,
    minutes_before,
    select_series,
)
from batchmill.export.remote_write.client import (
    STALE,
    RemoteTarget,
    RemoteWriteClient,
    Sample,
    series_labels,
)
from batchmill.export.remote_write.sender import PositionFile, SampleSender
from batchmill.export.remote_write.stats import (
    RemoteWriteSettings,
    RemoteWriteStats,
    StatsRecorder,
)
from batchmill.lifecycle import Closing
from batchmill.queue import BatchQueue
from batchmill.store import Store
from batchmill.wording import count_of

log = logging.getLogger("batchmill.export")


class RemoteWriter(Closing):
    """Follows a store and writes its minutes to a receiver, on threads of its own, until closed.

    The store is the caller's, and is closed by them after the writer. ``position`` is a file of
    this store and this receiver alone.

    >>> with open_store("sqlite:///metrics.db") as store:  # doctest: +SKIP
    ...     writer = RemoteWriter(store, "remote+http://127.0.0.1:9090/api/v1/write", "position")
    """

    def __init__(
        self,
        store: Store,
        to: str,
        position: str | Path,
        settings: RemoteWriteSettings | None = None,
        *,
        token: str | None = None,
        headers: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.settings = settings or RemoteWriteSettings()
        self.target = RemoteTarget.parse(to, token, headers)
        self._store = store
        self._clock = clock
        self._recorder = StatsRecorder()
        self._position = PositionFile(Path(position), store.id, self.target.url)
        client = RemoteWriteClient(self.target, self.settings.timeout_s)
        self._sender = SampleSender(
            client, self._position, self.settings, self._recorder, self.target.url
        )
        self._reached = self._position.minute
        """The last minute that is in the queue, or done."""
        self._from_start = False
        """Whether the store was seen empty: then nothing in it is history."""
        self._live: set[Labels] = set()
        """The series that have not ended for the receiver."""
        self._sent_values: dict[int, dict[int, float]] = {}
        """What was sent of the last minutes: by minute, and by the series' hash."""
        self._commits: object = None
        """The last commit of each stream when late rows were last looked for."""
        self._late_checked_s = 0.0
        self._dropped_log = DroppedSeriesLog()
        self._ending = threading.Event()
        self._queue: BatchQueue[Sample] = BatchQueue(
            "REMOTE_WRITE",
            presets.grpc_exporter(
                self._sender,
                buffer_size=self.settings.buffer_samples,
                max_batch=self.settings.max_samples,
            ),
        )
        self._thread = threading.Thread(target=self._follow, name="batchmill-remote-write")
        self._thread.start()

    def stats(self) -> RemoteWriteStats:
        """What became of the samples so far."""
        return self._recorder.stats(self._position.minute)

    def close(self, timeout_s: float | None = None) -> bool:
        """Read no further minute, send what waits, and end; True if all of it was answered."""
        self._ending.set()
        self._queue.flush(self.settings.close_timeout_s if timeout_s is None else timeout_s)
        self._sender.give_up()
        self._queue.shutdown()
        self._thread.join()
        stats = self.stats()
        return not stats.unsent and not stats.waiting

    def _follow(self) -> None:
        primed = False
        while not self._ending.is_set():
            try:
                if not primed and self._reached is not None:
                    # What the process before has sent: series of it may have ended since.
                    self._remember(self._reached, _values(self._select(self._reached)))
                primed = True
                self._enqueue_new()
            except (BatchmillError, OSError) as error:
                if self._recorder.fault("store not read") == 1:
                    log.warning("remote write cannot read the store, and tries again: %s", error)
            except Exception:  # whatever it is, the next try may well succeed
                if self._recorder.fault("failed") == 1:
                    log.exception("remote write failed, and tries again")
            self._ending.wait(self.settings.poll_s)

    def _enqueue_new(self) -> None:
        """Put every minute that has become complete into the queue, then what late rows changed."""
        store = self._store
        commits = [(stream.name, stream.epoch, stream.committed_ms) for stream in store.streams()]
        newest, wall_s = store.newest_minute(), self._clock()
        complete = complete_minute(newest, wall_s)
        if newest is None or complete is None:
            self._from_start = True
            return
        self._leave_future(newest, complete, wall_s)
        for minute in minutes_after(self._start(complete), complete):
            if not self._enqueue_minute(minute):
                return
        now_s = time.monotonic()
        due = now_s - self._late_checked_s >= self.settings.late_every_s
        if due and commits != self._commits:
            self._commits, self._late_checked_s = commits, now_s
            self._enqueue_late()

    def _leave_future(self, newest: int, complete: int, wall_s: float) -> None:
        """Go back from a minute still to come, which a wrong clock has written.

        Only where the store was repaired, and has no such minute any more: else nobody knows which
        clock was wrong, that of today or the one before.
        """
        reached = self._reached
        if reached is None or newest >= reached or end_s(minutes_before(reached, 1)) <= wall_s:
            return
        last = self._store.clock().last_minute
        if last is None or last >= reached:
            return
        self._recorder.fault("position from the future")
        resumed = self._position.last_until(complete)
        self._reached = minutes_before(complete, 1) if resumed is None else resumed
        log.warning(
            "remote write has sent minutes up to %d, which is in the future and no longer in the "
            "store: it continues after minute %d. A receiver that took samples from the future may "
            "refuse others until those are deleted there",
            *(reached, self._reached),
        )
        self._sent_values.clear()
        self._remember(self._reached, _values(self._select(self._reached)))

    def _start(self, complete: int) -> int:
        """The minute behind which to begin."""
        first = minutes_before(complete, self.settings.catch_up_minutes)
        if self._reached is None:
            self._reached = first if self._from_start else minutes_before(complete, 1)
        if self._reached < first:
            skipped = round((end_s(first) - end_s(self._reached)) / 60)
            self._recorder.add(minutes_skipped=skipped)
            log.warning(
                "remote write was away for too long: it skips %s, from %d to %d, and continues "
                "after that (catch_up_minutes is %d)",
                *(count_of(skipped, "minute"), minutes_before(self._reached, -1), first),
                self.settings.catch_up_minutes,
            )
            self._reached = first
        return self._reached

    def _enqueue_minute(self, minute: int) -> bool:
        """Put a minute into the queue; False if it takes no more."""
        selection = self._select(minute)
        values = _values(selection)
        at_ms = round(end_s(minute) * 1000)
        ended = sorted(self._live - values.keys())
        samples = [Sample(minute, at_ms, labels, value) for labels, value in values.items()]
        samples += [Sample(minute, at_ms, labels, STALE) for labels in ended]
        if not self._put(samples):
            return False
        self._recorder.add(dropped=sum(selection.dropped.values()))
        if not self._queue.produce(Sample(minute)):
            return False
        self._reached = minute
        self._remember(minute, values)
        self._dropped_log.log(selection.dropped)
        return True

    def _enqueue_late(self) -> None:
        """Put into the queue what has changed of the last minutes since it was read.

        The newest one waits: Prometheus takes no other value for the newest time that it has of a
        series, whatever its settings.
        """
        new_before: set[Labels] = set()
        """Series that late rows have added to the minute before."""
        for minute, sent in sorted(self._sent_values.items()):
            if self._recorder.late_refused:
                self._sent_values.clear()
                return
            newest = minute == self._reached
            values = {} if newest else _values(self._select(minute))
            at_ms = round(end_s(minute) * 1000)
            changed = [
                Sample(minute, at_ms, labels, value, late=True)
                for labels, value in values.items()
                if sent.get(hash(labels)) != value
            ]
            # Series that are new in the minute before, and that this one has not, end here.
            present = self._live if newest else values.keys()
            ended = sorted(labels for labels in new_before - present if hash(labels) not in sent)
            changed += [Sample(minute, at_ms, labels, STALE, late=True) for labels in ended]
            if not self._put(changed):
                return
            new_before = {labels for labels in values if hash(labels) not in sent}
            if not newest:
                self._sent_values[minute] = _by_hash(values)

    def _select(self, minute: int) -> SeriesSelection:
        limits = self.settings.limits
        values = self._store.bucket_values(minute, most=limits.max_series_per_metric)
        return select_series(values, limits)

    def _remember(self, minute: int, values: dict[Labels, float]) -> None:
        """Keep what later minutes, and late rows of this one, are compared with."""
        self._live = set(values)
        if self.settings.late_minutes and not self._recorder.late_refused:
            self._sent_values[minute] = _by_hash(values)
            while len(self._sent_values) > self.settings.late_minutes + 1:
                del self._sent_values[min(self._sent_values)]

    def _put(self, samples: list[Sample]) -> bool:
        """Put samples into the queue, waiting for room; False if it takes no more."""
        step = self.settings.max_samples
        for start in range(0, len(samples), step):
            if self._ending.is_set():
                return False
            piece = samples[start : start + step]
            self._count(piece, 1)  # first: they may be sent before produce_many() is back
            accepted = self._queue.produce_many(piece)
            if accepted < len(piece):
                self._count(piece[accepted:], -1)
                return False
        return True

    def _count(self, samples: list[Sample], sign: int) -> None:
        self._recorder.add(
            taken=sign * len(samples),
            late=sign * sum(sample.late for sample in samples),
            ended=sign * sum(sample.value is STALE for sample in samples),
        )


def _values(selection: SeriesSelection) -> dict[Labels, float]:
    return {
        series_labels(family.name, series.labels): float(series.value)
        for family in selection.families
        for series in family.series
    }


def _by_hash(values: dict[Labels, float]) -> dict[int, float]:
    """The values by the hash of their series: the names of a few minutes would fill the memory."""
    return {hash(labels): value for labels, value in values.items()}
