"""Remote write 1.0: every complete minute of a store to a Prometheus, or whatever takes the same.

* A minute is sent once its successor has begun, in order, each value at the minute's end. A series
  that the minute before had and this one has not is ended by a stale marker.
* At least once: the position moves when a whole minute is answered. A restart sends again what was
  under way, which a receiver knows already with the same value, and goes on behind it. Without a
  position it begins with the newest complete minute, or at the start of a store that was empty.
* Bounded: the queue holds so many samples, and while it is full no further minute is read; the
  store keeps them meanwhile. After a pause, minutes that are too far back are skipped and counted.
* Late rows: the last minutes but the newest are looked at again, and what they have changed or
  brought is sent, in requests of their own. A stock Prometheus refuses what is older than what it
  has of a series, and no more of it is sent then; with an ``out_of_order_time_window`` it takes it.

Nothing of this is on the way of a commit: the store is only read.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from batchmill import presets
from batchmill.closing import Closing
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
from batchmill.export.remote_write.http import Connection, Target
from batchmill.export.remote_write.position import Position
from batchmill.export.remote_write.proto import STALE, series_labels
from batchmill.export.remote_write.sender import Item, Sender
from batchmill.export.remote_write.stats import RemoteWriteSettings, RemoteWriteStats, Tally
from batchmill.queue import BatchQueue
from batchmill.store import Store

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
        self.target = Target.parse(to, token, headers)
        self._store = store
        self._clock = clock
        self._tally = Tally()
        self._position = Position(Path(position), store.id, self.target.url)
        connection = Connection(self.target, self.settings.timeout_s)
        self._sender = Sender(
            connection, self._position, self.settings, self._tally, self.target.url
        )
        self._reached = self._position.minute
        """The last minute that is in the queue, or done with."""
        self._from_start = False
        """Whether the store was seen empty: then nothing in it is history."""
        self._live: set[Labels] = set()
        """The series that the receiver takes for alive."""
        self._values: dict[int, dict[int, float]] = {}
        """What was sent of the last minutes: by minute, and by the series' hash."""
        self._mark: object = None
        self._late_looked_s = 0.0
        self._dropped_log = DroppedSeriesLog()
        self._ending = threading.Event()
        self._queue: BatchQueue[Item] = BatchQueue(
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
        return self._tally.stats(self._position.minute)

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
                    self._remember(self._reached, _samples(self._chosen(self._reached)))
                primed = True
                self._look()
            except (BatchmillError, OSError) as error:
                if self._tally.fault("store not read") == 1:
                    log.warning("remote write cannot read the store, and tries again: %s", error)
            except Exception:  # whatever it is, the next look may well succeed
                if self._tally.fault("failed") == 1:
                    log.exception("remote write failed, and tries again")
            self._ending.wait(self.settings.poll_s)

    def _look(self) -> None:
        """Put every minute that has become complete into the queue, then what late rows changed."""
        store = self._store
        mark = [(each.name, each.epoch, each.committed_at) for each in store.streams()]
        complete = complete_minute(store.newest_minute(), self._clock())
        if complete is None:
            self._from_start = True
            return
        for minute in minutes_after(self._start(complete), complete):
            if not self._send(minute):
                return
        now_s = time.monotonic()
        if mark != self._mark and now_s - self._late_looked_s >= self.settings.late_every_s:
            self._mark, self._late_looked_s = mark, now_s
            self._send_late()

    def _start(self, complete: int) -> int:
        """The minute behind which to begin."""
        first = minutes_before(complete, self.settings.catch_up_minutes)
        if self._reached is None:
            self._reached = first if self._from_start else minutes_before(complete, 1)
        if self._reached < first:
            skipped = round((end_s(first) - end_s(self._reached)) / 60)
            self._tally.add(minutes_skipped=skipped)
            log.warning(
                "remote write was away for too long: it skips the %d minutes from %d to %d, and "
                "goes on behind them (catch_up_minutes is %d)",
                *(skipped, minutes_before(self._reached, -1), first),
                self.settings.catch_up_minutes,
            )
            self._reached = first
        return self._reached

    def _send(self, minute: int) -> bool:
        """Put a minute into the queue; False if that ends."""
        chosen = self._chosen(minute)
        found = _samples(chosen)
        at_ms = round(end_s(minute) * 1000)
        ended = sorted(self._live - found.keys())
        items = [Item(minute, at_ms, labels, value) for labels, value in found.items()]
        items += [Item(minute, at_ms, labels, STALE) for labels in ended]
        if not self._put(items):
            return False
        self._tally.add(dropped=sum(chosen.dropped.values()))
        if not self._queue.produce(Item(minute)):
            return False
        self._reached = minute
        self._remember(minute, found)
        self._dropped_log.log(chosen.dropped)
        return True

    def _send_late(self) -> None:
        """Put into the queue what has changed of the last minutes since it was read.

        The newest one waits: Prometheus takes no other value for the newest time that it has of a
        series, whatever its settings.
        """
        before: set[Labels] = set()
        for minute, sent in sorted(self._values.items()):
            if self._tally.late_refused:
                self._values.clear()
                return
            newest = minute == self._reached
            found = {} if newest else _samples(self._chosen(minute))
            at_ms = round(end_s(minute) * 1000)
            changed = [
                Item(minute, at_ms, labels, value, late=True)
                for labels, value in found.items()
                if sent.get(hash(labels)) != value
            ]
            # Series that came late to the minute before, and that this one has not, end here.
            there = self._live if newest else found.keys()
            ended = sorted(each for each in before - there if hash(each) not in sent)
            changed += [Item(minute, at_ms, labels, STALE, late=True) for labels in ended]
            if not self._put(changed):
                return
            before = {each for each in found if hash(each) not in sent}
            if not newest:
                self._values[minute] = _hashed(found)

    def _chosen(self, minute: int) -> SeriesSelection:
        limits = self.settings.limits
        values = self._store.bucket_values(minute, most=limits.max_series_per_metric)
        return select_series(values, limits)

    def _remember(self, minute: int, found: dict[Labels, float]) -> None:
        """Keep what later minutes, and later looks at this one, are compared with."""
        self._live = set(found)
        if self.settings.late_minutes and not self._tally.late_refused:
            self._values[minute] = _hashed(found)
            while len(self._values) > self.settings.late_minutes + 1:
                del self._values[min(self._values)]

    def _put(self, items: list[Item]) -> bool:
        """Put samples into the queue, waiting for room; False if it takes no more."""
        step = self.settings.max_samples
        for start in range(0, len(items), step):
            if self._ending.is_set():
                return False
            piece = items[start : start + step]
            self._count(piece, 1)  # first: they may be sent before produce_many() is back
            accepted = self._queue.produce_many(piece)
            if accepted < len(piece):
                self._count(piece[accepted:], -1)
                return False
        return True

    def _count(self, items: list[Item], sign: int) -> None:
        self._tally.add(
            taken=sign * len(items),
            late=sign * sum(each.late for each in items),
            ended=sign * sum(each.value is STALE for each in items),
        )


def _samples(chosen: SeriesSelection) -> dict[Labels, float]:
    return {
        series_labels(family.name, series.labels): float(series.value)
        for family in chosen.families
        for series in family.series
    }


def _hashed(found: dict[Labels, float]) -> dict[int, float]:
    """The values by the hash of their series: the names of a few minutes would fill the memory."""
    return {hash(labels): value for labels, value in found.items()}
