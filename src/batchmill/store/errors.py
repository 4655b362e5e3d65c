"""The errors of a store. Each message ends with what to do next."""

from __future__ import annotations

from typing import Any

from batchmill.errors import BatchmillError
from batchmill.wording import count_of


class StoreError(BatchmillError):
    """Base of the errors of this package."""


class StoreMissingError(StoreError, FileNotFoundError):
    """There is no store at that address, and none was to be created."""

    url: str
    template = "there is no store at {url}: check the address, or run the pipeline first"


class NotAStoreError(StoreError, ValueError):
    """What is at that address cannot be read as a store."""

    url: str
    why: str
    template = (
        "{url} is not a store that can be read ({why}): use another address, "
        "or restore this store together with its checkpoint from a backup"
    )


class StoreVersionError(StoreError, RuntimeError):
    """A newer batchmill wrote that store."""

    url: str
    found: int
    """The store's schema version."""
    supported: int
    template = (
        "{url} has schema version {found}, and this batchmill supports versions up to {supported}: "
        "use the newer batchmill that wrote it"
    )


class StoreRefusedError(StoreError, PermissionError):
    """The database does not let this user connect."""

    url: str
    why: str
    template = (
        "{url} refused the connection ({why}): check user, password and database in the address, "
        "and the server's pg_hba.conf"
    )


class StoreReadOnlyError(StoreError, PermissionError):
    """The store cannot be written."""

    url: str
    why: str
    template = (
        "{url} cannot be written ({why}): give this user the right to write the database, and for "
        "SQLite its folder too; nothing was changed"
    )


class StoreFullError(StoreError, OSError):
    """There is no disk space for what was to be written."""

    where: str
    free_bytes: int | None
    why: str

    def __str__(self) -> str:
        free = "" if self.free_bytes is None else f", {count_of(self.free_bytes, 'byte')} free"
        return (
            f"no disk space in {self.where} ({self.why}{free}): make room or lower ttl_days, then "
            "start again; nothing of the batch was written, and it will be tried again"
        )


class StoreUnavailableError(StoreError, ConnectionError):
    """The database did not answer for too long; its last error is the ``__cause__``."""

    url: str
    attempts: int
    seconds: float
    why: str

    def __str__(self) -> str:
        return (
            f"{self.url} could not be used: tried {count_of(self.attempts, 'time')} over "
            f"{self.seconds:.1f} s; last error: {self.why}. Check that the database runs and can "
            "be reached, then start again: a batch that was not committed is tried again, one that "
            "was committed is not counted twice"
        )


class StoreClosedError(StoreError, RuntimeError):
    """The store was closed."""

    url: str
    template = "the store {url} is closed: open it again with open_store()"


class StoreInUseError(StoreError, RuntimeError):
    """Another live process writes that stream."""

    url: str
    stream: str
    holder: dict[str, Any]
    """``host``, ``pid`` and ``since`` of that process, as far as they are known."""

    def __str__(self) -> str:
        known = [f"{name} {self.holder[name]}" for name in ("host", "pid") if name in self.holder]
        since = f", since {self.holder['since']}" if "since" in self.holder else ""
        return (
            f"the stream {self.stream!r} of {self.url} is being written by another process "
            f"({', '.join(known) or 'not known which'}{since}): stop that one first, "
            "or give this run another stream name"
        )


class FencedError(StoreError, RuntimeError):
    """A newer writer has taken the stream over."""

    stream: str
    epoch: int
    current: int | None
    """The epoch of the newer writer; None: nobody has claimed the stream at all."""

    def __str__(self) -> str:
        if self.current is None:
            return f"nobody has claimed the stream {self.stream!r}: call claim() before commit()"
        return (
            f"the stream {self.stream!r} was claimed again (epoch {self.current}), so this writer "
            f"of epoch {self.epoch} may not commit any more: stop it; the newer one goes on"
        )


class BatchGapError(StoreError, ValueError):
    """A batch's number does not follow the last committed one."""

    stream: str
    number: int
    expected: int
    template = (
        "the stream {stream!r} expects batch {expected}, but {number} came: "
        "batches in between would be lost; run with the checkpoint that belongs to this store"
    )


class StaleTaskError(StoreError, RuntimeError):
    """A task of an earlier run of a batch, which was begun again since."""

    stream: str
    number: int
    template = (
        "batch {number} of the stream {stream!r} was begun again since this task was started: its "
        "work is done by another task, and nothing of it was written"
    )


class PartConflictError(StoreError, RuntimeError):
    """Some parts of a task are committed and others are not."""

    stream: str
    number: int
    recorded: tuple[int, ...]
    missing: tuple[int, ...]

    def __str__(self) -> str:
        return (
            f"of batch {self.number} of the stream {self.stream!r} {_parts_are(self.recorded)} in "
            f"the store and {_parts_are(self.missing)} not, though one task commits them together: "
            "the parts were divided among the tasks in another way than before; give a task only "
            "parts that are not in the store"
        )


class PartsMissingError(StoreError, RuntimeError):
    """A batch was to be completed, and not exactly its parts are committed."""

    stream: str
    number: int
    parts: int
    missing: tuple[int, ...]
    unknown: tuple[int, ...]
    """Parts that are committed and that the batch does not have."""

    def __str__(self) -> str:
        wrong = [f"{_parts_are(self.missing)} not in the store"] if self.missing else []
        wrong += [f"the store also has {_parts(self.unknown)}"] if self.unknown else []
        return (
            f"batch {self.number} of the stream {self.stream!r} has {count_of(self.parts, 'part')}"
            f" (0 to {self.parts - 1}), but {' and '.join(wrong)}: run the batch again with the "
            "same number of parts; those that are in the store are not counted twice"
        )


class RowsMismatchError(StoreError, RuntimeError):
    """The parts of a batch do not hold the rows that were read."""

    stream: str
    number: int
    expected: dict[str, int]
    """Rows that were read, by source."""
    recorded: dict[str, int]
    """Rows that went into the parts, by source."""

    def __str__(self) -> str:
        sources = sorted({*self.expected, *self.recorded})
        wrong = ", ".join(
            f"{source}: {self.expected.get(source, 0)} read, {self.recorded.get(source, 0)} in the "
            "parts"
            for source in sources
            if self.expected.get(source, 0) != self.recorded.get(source, 0)
        )
        return (
            f"batch {self.number} of the stream {self.stream!r} cannot be completed, because rows "
            f"were lost or doubled on the way to its parts ({wrong}): its input has changed since "
            "an earlier run, or this is a mistake in batchmill; restore the input, or report it"
        )


class CheckpointMismatchError(StoreError, ValueError):
    """Checkpoint and store do not belong together."""

    stream: str
    reason: str
    """How the store differs: ``other``, ``unknown``, ``behind``, ``ahead`` or ``unplanned``."""
    detail: str
    advice: str
    template = "stream {stream!r}: {detail}: {advice}"


class TooManyColumnsError(StoreError, ValueError):
    """The metrics of one source need more columns than a table can have."""

    source: str
    needed: int
    limit: int
    template = (
        "the metrics of {source} take {needed} columns, and a table has {limit} at most: remove "
        "metrics of this source, or start a new store (columns of removed metrics are used again "
        "once their values have expired)"
    )


class MetricConflictError(StoreError, ValueError):
    """Another stream computes a metric of that name with another definition."""

    metric: str
    streams: tuple[str, ...]
    """The streams that compute it."""
    theirs: str
    ours: str
    retire: bool

    def __str__(self) -> str:
        streams = ", ".join(map(repr, self.streams)) or "another stream"
        advice = (
            "give one of the two another name, or use the same definition in both scripts; if that "
            "stream is gone for good, call Store.register([], stream=…) once to release its metrics"
            if self.retire
            else "use the same script (--oal) as that stream, or give the metric another name"
        )
        return (
            f"the metric {self.metric!r} of {streams} is {self.theirs}, and here it is "
            f"{self.ours}: {advice}"
        )


class StatementFailedError(StoreError, RuntimeError):
    """The database has refused a statement for a reason that batchmill does not know."""

    url: str
    why: str
    template = (
        "a statement failed in the database of {url} ({why}): nothing of its transaction was "
        "written. If triggers, constraints or columns were added to the store's tables by hand, "
        "remove them; else report this as a bug of batchmill"
    )


class LayoutChangedError(StoreError, RuntimeError):
    """A column was given to another metric since this writer registered its metrics."""

    source: str
    column: str
    metric: str
    """The metric that has the column now."""
    template = (
        "the column {column} of {source} belongs to the metric {metric!r} and is not one that this "
        "stream has registered: register the metrics again, that is, restart the pipeline; nothing "
        "of the batch was written"
    )


class StaleStateError(StoreError, RuntimeError):
    """A batch drops a file of pending spans that is not pending any more."""

    stream: str
    path: str
    template = (
        "the pending spans in {path} of the stream {stream!r} are in the store already: an earlier "
        "commit succeeded though its answer was lost. Nothing of this batch was written: claim the "
        "stream again, and go on with the files that the claim lists"
    )


class NamesClashError(StoreError, ValueError):
    """Two sources would share a table, or a source's name is too long for one."""

    source: str
    why: str
    template = "the source {source!r} cannot have a table ({why}): rename it"


def _parts(numbers: tuple[int, ...]) -> str:
    """``part 3`` or ``parts 1, 3``."""
    return f"part{'' if len(numbers) == 1 else 's'} {', '.join(map(str, numbers))}"


def _parts_are(numbers: tuple[int, ...]) -> str:
    """``part 3 is`` or ``parts 1, 3 are``."""
    return f"{_parts(numbers)} {'is' if len(numbers) == 1 else 'are'}"
