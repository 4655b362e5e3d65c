"""What goes wrong with a store. Each error says what to do next."""

from __future__ import annotations

from typing import Any

from batchmill.errors import BatchmillError


class StoreError(BatchmillError):
    """Base of the errors of this package."""

    _fields: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        # OSError keeps no more than two of its arguments, so they are taken from the attributes.
        return type(self), tuple(getattr(self, name) for name in self._fields)


class StoreMissingError(StoreError, FileNotFoundError):
    """There is no store at that address, and none was to be made; carries ``url``."""

    _fields = ("url",)

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.url = url

    def __str__(self) -> str:
        return f"there is no store at {self.url}: check the address, or run the pipeline first"


class NotAStoreError(StoreError, ValueError):
    """What is there cannot be read as a store; carries ``url`` and ``why``."""

    _fields = ("url", "why")

    def __init__(self, url: str, why: str) -> None:
        super().__init__(url, why)
        self.url = url
        self.why = why

    def __str__(self) -> str:
        return (
            f"{self.url} is no store that can be read ({self.why}): name another place, "
            "or restore this one together with its checkpoint from a copy"
        )


class StoreVersionError(StoreError, RuntimeError):
    """A newer batchmill made that store; carries ``url``, ``found`` and ``supported``."""

    _fields = ("url", "found", "supported")

    def __init__(self, url: str, found: int, supported: int) -> None:
        super().__init__(url, found, supported)
        self.url = url
        self.found = found
        self.supported = supported

    def __str__(self) -> str:
        return (
            f"{self.url} has the schema {self.found}, and this batchmill knows those up to "
            f"{self.supported}: use the newer batchmill that made it"
        )


class StoreRefusedError(StoreError, PermissionError):
    """The database does not let this user in; carries ``url`` and ``why``."""

    _fields = ("url", "why")

    def __init__(self, url: str, why: str) -> None:
        super().__init__(url, why)
        self.url = url
        self.why = why

    def __str__(self) -> str:
        return (
            f"{self.url} refused the connection ({self.why}): check user, password and database "
            "in the address, and the server's pg_hba.conf"
        )


class StoreReadOnlyError(StoreError, PermissionError):
    """The store cannot be written; carries ``url`` and ``why``."""

    _fields = ("url", "why")

    def __init__(self, url: str, why: str) -> None:
        super().__init__(url, why)
        self.url = url
        self.why = why

    def __str__(self) -> str:
        return (
            f"{self.url} cannot be written ({self.why}): give this user the right to write the "
            "database, and for SQLite its folder too; nothing was changed"
        )


class StoreFullError(StoreError, OSError):
    """There is no room for what was to be written; carries ``where``, ``free_bytes``, ``why``."""

    _fields = ("where", "free_bytes", "why")

    def __init__(self, where: str, free_bytes: int | None, why: str) -> None:
        super().__init__(where, why)
        self.where = where
        self.free_bytes = free_bytes
        self.why = why

    def __str__(self) -> str:
        free = "" if self.free_bytes is None else f", {self.free_bytes:,} bytes are free there"
        return (
            f"no room in {self.where} ({self.why}{free}): make room or lower ttl_days, then start "
            "again; nothing of the batch was written, and it will be tried anew"
        )


class StoreUnavailableError(StoreError, ConnectionError):
    """The store did not answer for too long.

    Carries ``url``, ``attempts``, ``seconds`` and ``why``; the last fault is its ``__cause__``.
    """

    _fields = ("url", "attempts", "seconds", "why")

    def __init__(self, url: str, attempts: int, seconds: float, why: str) -> None:
        super().__init__(url, why)
        self.url = url
        self.attempts = attempts
        self.seconds = seconds
        self.why = why

    def __str__(self) -> str:
        return (
            f"{self.url} could not be used, tried {self.attempts} times over {self.seconds:.1f} s; "
            f"last: {self.why}. Check that the database runs and can be reached, then start again: "
            "a batch that did not get in is tried anew, one that did is not counted twice"
        )


class StoreClosedError(StoreError, RuntimeError):
    """The store was closed; carries ``url``."""

    _fields = ("url",)

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.url = url

    def __str__(self) -> str:
        return f"the store {self.url} is closed: open it again with open_store()"


class StoreInUseError(StoreError, RuntimeError):
    """Another live process writes that stream; carries ``url``, ``stream`` and ``holder``.

    ``holder`` has ``host``, ``pid`` and ``since`` as far as they are known.
    """

    _fields = ("url", "stream", "holder")

    def __init__(self, url: str, stream: str, holder: dict[str, Any]) -> None:
        super().__init__(url, stream, holder)
        self.url = url
        self.stream = stream
        self.holder = holder

    def __str__(self) -> str:
        known = [f"{name} {self.holder[name]}" for name in ("host", "pid") if name in self.holder]
        since = f", since {self.holder['since']}" if "since" in self.holder else ""
        return (
            f"the stream {self.stream!r} of {self.url} is being written by another process "
            f"({', '.join(known) or 'not known which'}{since}): stop that one first, "
            "or give this run another stream name"
        )


class FencedError(StoreError, RuntimeError):
    """A newer writer has taken the stream over; carries ``stream``, ``epoch`` and ``current``.

    ``current`` is None where nobody has claimed the stream at all.
    """

    _fields = ("stream", "epoch", "current")

    def __init__(self, stream: str, epoch: int, current: int | None) -> None:
        super().__init__(stream, epoch, current)
        self.stream = stream
        self.epoch = epoch
        self.current = current

    def __str__(self) -> str:
        if self.current is None:
            return f"nobody has claimed the stream {self.stream!r}: call claim() before commit()"
        return (
            f"the stream {self.stream!r} was claimed again (epoch {self.current}), so this writer "
            f"of epoch {self.epoch} may not commit any more: stop it; the newer one goes on"
        )


class BatchGapError(StoreError, ValueError):
    """A batch's number does not follow; carries ``stream``, ``number`` and ``expected``."""

    _fields = ("stream", "number", "expected")

    def __init__(self, stream: str, number: int, expected: int) -> None:
        super().__init__(stream, number, expected)
        self.stream = stream
        self.number = number
        self.expected = expected

    def __str__(self) -> str:
        return (
            f"the stream {self.stream!r} expects batch {self.expected}, but {self.number} came: "
            "batches in between would be lost; run with the checkpoint that belongs to this store"
        )


class CheckpointMismatchError(StoreError, ValueError):
    """Checkpoint and store do not belong together.

    Carries ``stream``, ``reason`` (``other``, ``unknown``, ``behind``, ``ahead`` or ``unplanned``:
    how the store stands to the checkpoint), ``detail`` and ``advice``.
    """

    _fields = ("stream", "reason", "detail", "advice")

    def __init__(self, stream: str, reason: str, detail: str, advice: str) -> None:
        super().__init__(stream, reason, detail, advice)
        self.stream = stream
        self.reason = reason
        self.detail = detail
        self.advice = advice

    def __str__(self) -> str:
        return f"stream {self.stream!r}: {self.detail}: {self.advice}"


class TooManyColumnsError(StoreError, ValueError):
    """The metrics of one source need more columns than a table can have.

    Carries ``source``, ``needed`` and ``limit``.
    """

    _fields = ("source", "needed", "limit")

    def __init__(self, source: str, needed: int, limit: int) -> None:
        super().__init__(source, needed, limit)
        self.source = source
        self.needed = needed
        self.limit = limit

    def __str__(self) -> str:
        return (
            f"the metrics of {self.source} take {self.needed} columns, and a table has "
            f"{self.limit} at most: remove metrics of this source, or start a new store (columns "
            "of removed metrics are used again once their values have expired)"
        )


class MetricConflictError(StoreError, ValueError):
    """Another stream computes a metric of that name, with another definition.

    Carries ``metric``, ``streams`` (whose it is), ``theirs``, ``ours`` and ``retire``.
    """

    _fields = ("metric", "streams", "theirs", "ours", "retire")

    def __init__(
        self, metric: str, streams: tuple[str, ...], theirs: str, ours: str, retire: bool
    ) -> None:
        super().__init__(metric, streams, theirs, ours, retire)
        self.metric = metric
        self.streams = streams
        self.theirs = theirs
        self.ours = ours
        self.retire = retire

    def __str__(self) -> str:
        whose = ", ".join(repr(each) for each in self.streams) or "another stream"
        advice = (
            "give one of the two another name, or use the same definition in both scripts; if that "
            "stream is gone for good, Store.register([], stream=…) once lets go of its metrics"
            if self.retire
            else "use the same script (--oal) as that stream, or give the metric another name"
        )
        return (
            f"the metric {self.metric!r} of {whose} is {self.theirs}, and here it is {self.ours}: "
            f"{advice}"
        )


class LayoutChangedError(StoreError, RuntimeError):
    """A column was given to another metric since this writer registered its own.

    Carries ``source``, ``column`` and ``metric`` (whose it is now).
    """

    _fields = ("source", "column", "metric")

    def __init__(self, source: str, column: str, metric: str) -> None:
        super().__init__(source, column, metric)
        self.source = source
        self.column = column
        self.metric = metric

    def __str__(self) -> str:
        return (
            f"the column {self.column} of {self.source} belongs to the metric {self.metric!r} "
            "and is not one that this stream has registered: register the metrics again, that is, "
            "start the pipeline anew; nothing of the batch was written"
        )


class StaleCarryError(StoreError, RuntimeError):
    """A batch drops a file of waiting spans that waits no more; carries ``stream`` and ``path``."""

    _fields = ("stream", "path")

    def __init__(self, stream: str, path: str) -> None:
        super().__init__(stream, path)
        self.stream = stream
        self.path = path

    def __str__(self) -> str:
        return (
            f"the waiting spans in {self.path} of the stream {self.stream!r} are in the store "
            "already: an earlier commit got in though its answer was lost. Nothing of this one was "
            "written: claim the stream again, and go on with the files that the claim names"
        )


class NamesClashError(StoreError, ValueError):
    """Two sources would share a table, or a name is too long for one.

    Carries ``source`` and ``why``.
    """

    _fields = ("source", "why")

    def __init__(self, source: str, why: str) -> None:
        super().__init__(source, why)
        self.source = source
        self.why = why

    def __str__(self) -> str:
        return f"the source {self.source!r} cannot have a table ({self.why}): rename it"
