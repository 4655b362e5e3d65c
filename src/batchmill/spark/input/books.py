"""The books of a stream: what its newest batch is made of, and what was read.

They are lines of JSON in one file, ``<checkpoint>/books.jsonl``. Before a batch runs, its plan is
appended; once it is in the store, it is marked as done. So a batch that did not come to its end is
run again with the same input and the same clock::

    {"done": 41, "segments": 950, "offsets": {}}        what all batches before have come to
    {"read": ["/spool/Span/a.parquet"]}                 segments that were read, and still exist
    {"plan": 42, "now": 1793000000.5, "parts": 8, "segments": ["/spool/Span/b.parquet"]}
    {"again": 42}                                       it did not come to its end, and is repeated
    {"done": 42}

A plan with ``most`` has no more rows or messages than that, because a batch before it was too
large: so it is after a restart. A plan without input is that of a batch that gives up on spans
which have waited long enough; with ``"expire": "all"``, on all.

A batch that dies again and again, for lack of memory for example, may get a smaller plan, as long
as the store has nothing of it: a second line ``plan`` with the same number replaces the first.

The file is compacted as it grows: plans that are done become names of segments that were read, and
names whose segment is gone are left out. So it stays as small as what lies in the spool; of a topic
only an offset for each partition is kept.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchmill.files import sync
from batchmill.spark.errors import PipelineError
from batchmill.spark.files.paths import AnyPath, append, write_whole

NAME = "books.jsonl"
_COMPACT_BYTES = 256 * 1024
"""A smaller file is not compacted."""
_NAMES_A_LINE = 1000


@dataclass(frozen=True)
class Plan:
    """The input of a batch, and all that it must have in common with its repetition."""

    batch: int
    now: float
    """Seconds since 1970."""
    parts: int
    """Into how many parts traces and entities are divided."""
    segments: tuple[str, ...] = ()
    """Local paths of segments, or their URIs."""
    topic: str = ""
    offsets: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """By partition of the topic: the first message, and the first after the last."""
    settled: float | None = None
    """Older input waits: all that was written before this time was read, in seconds since 1970."""
    latest: float | None = None
    """Rows may be of that time, in seconds since 1970, as the clock seems to be behind. None: the
    clock decides."""
    most: int | None = None
    """The most rows or messages of a batch, since one had to be made smaller."""
    step: float = 0.0
    """The clock was set ahead by so many seconds since the last plan; if negative, back."""
    expire_all: bool = False
    """Whether no span waits for its partner after it."""

    @property
    def has_input(self) -> bool:
        """Whether it reads anything; otherwise it only settles spans that have waited."""
        return bool(self.segments or self.topic)

    def line(self) -> dict[str, Any]:
        """The line in the books."""
        line: dict[str, Any] = {"plan": self.batch, "now": self.now, "parts": self.parts}
        optional = {
            "settled": self.settled,
            "latest": self.latest,
            "most": self.most,
            "step": self.step or None,
            "expire": "all" if self.expire_all else None,
        }
        line |= {key: value for key, value in optional.items() if value is not None}
        if self.topic:
            return {**line, "topic": self.topic, "offsets": self.offsets}
        return {**line, "segments": self.segments}

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Plan:
        """The plan in a line of the books."""
        offsets = {
            int(partition): (int(first), int(end))
            for partition, (first, end) in line.get("offsets", {}).items()
        }
        return cls(
            int(line["plan"]),
            float(line["now"]),
            int(line["parts"]),
            tuple(line.get("segments", ())),
            line.get("topic", ""),
            offsets,
            line.get("settled"),
            line.get("latest"),
            line.get("most"),
            line.get("step", 0.0),
            line.get("expire") == "all",
        )


@dataclass
class Account:
    """What the books say."""

    done: int | None = None
    """The last batch that is done."""
    plan: Plan | None = None
    """The newest plan, whether done or not."""
    begun: int = 0
    """How often the batch of that plan was begun without an error that explains its end."""
    segments: int = 0
    """How many segments went into the batches that are done."""
    read: set[str] = field(default_factory=set)
    """The paths of segments that were read; those that do not exist any more may be missing."""
    offsets: dict[str, dict[int, int]] = field(default_factory=dict)
    """By topic and partition: the first message that was not read."""
    most: int | None = None
    """That of the newest plan with input."""

    @property
    def planned(self) -> int | None:
        """The newest batch whose input is written down; it may not be done yet."""
        return self.done if self.plan is None else self.plan.batch

    @property
    def open_plan(self) -> Plan | None:
        """The plan of a batch that is not done."""
        return None if self.planned == self.done else self.plan

    def add(self, plan: Plan, begun: int = 1) -> None:
        """Add a plan, in place of one that is done or too large."""
        self.plan, self.begun = plan, begun
        if plan.has_input:
            self.most = plan.most

    def finish(self, number: int) -> None:
        """Mark a batch as done."""
        plan = self.plan
        if plan is not None and plan.batch == number != self.done:
            self.segments += len(plan.segments)
            self.read.update(plan.segments)
            if plan.topic:
                ends = {partition: end for partition, (_, end) in plan.offsets.items()}
                self.offsets.setdefault(plan.topic, {}).update(ends)
        self.done = number

    def apply(self, line: Mapping[str, Any]) -> None:
        """Add a line of the books."""
        if "plan" in line:
            self.add(Plan.of(line), line.get("begun", 1))
        elif "again" in line:
            self.begun += 1
        elif "error" in line:
            self.begun -= 1
        elif "read" in line:
            self.read.update(line["read"])
        else:
            if line["done"] is not None:
                self.finish(int(line["done"]))
            self.segments = line.get("segments", self.segments)
            self.most = line.get("most", self.most)
            for topic, offsets in line.get("offsets", {}).items():
                own = {int(partition): int(offset) for partition, offset in offsets.items()}
                self.offsets.setdefault(topic, {}).update(own)

    def lines(self) -> Iterator[dict[str, Any]]:
        """The fewest lines that say the same."""
        total = {"done": self.done, "segments": self.segments, "offsets": self.offsets}
        yield total if self.most is None else {**total, "most": self.most}
        names = sorted(self.read)
        for first in range(0, len(names), _NAMES_A_LINE):
            yield {"read": names[first : first + _NAMES_A_LINE]}
        if (plan := self.open_plan) is not None:
            yield {**plan.line(), "begun": self.begun}


def read_account(folder: AnyPath) -> Account | None:
    """What the books in a checkpoint say; None if there are none.

    A last line that is not whole was being written when the process or the machine died: it does
    not count.
    """
    try:
        lines = (folder / NAME).read_bytes().split(b"\n")
    except FileNotFoundError:
        return None
    account = Account()
    whole = lines[:-1]
    for at, line in enumerate(whole):
        try:
            account.apply(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if at == len(whole) - 1 and len(whole) > 1:
                break
            raise PipelineError(
                f"{folder / NAME} cannot be read ({error} in line {at + 1}): restore checkpoint "
                "and store, both from the same copy; or start with an empty checkpoint folder and "
                "an empty store"
            ) from error
    return account


class Books:
    """The books of one stream. May be used by several threads; one process may write them."""

    def __init__(self, folder: AnyPath, account: Account) -> None:
        """``account`` is what they say by now."""
        self.folder = folder
        self._file = folder / NAME
        self._account = account
        self._lock = threading.RLock()
        self._size = 0
        self._needed = _bytes_of(account.read)
        """How many bytes of the file the names of segments take that still exist."""
        self._left: set[str] = set()
        """Folders in which segments were forgotten since the file was last compacted."""

    def open(self) -> None:
        """Begin to write: a new file, in the place of one that is there."""
        with self._lock:
            self._compact()

    @property
    def done(self) -> int | None:
        """The last batch that is done."""
        return self._account.done

    @property
    def open_plan(self) -> Plan | None:
        """The plan of a batch that is not done."""
        return self._account.open_plan

    @property
    def next_batch(self) -> int:
        """The number of the next batch to be planned."""
        planned = self._account.planned
        return 0 if planned is None else planned + 1

    def begin(self, plan: Plan) -> None:
        """Write down what a batch is made of, durably, before it is run."""
        with self._lock:
            if self.open_plan is not None or plan.batch != self.next_batch:
                raise ValueError(f"batch {plan.batch} cannot be planned now")
            self._plan(plan)

    @property
    def most(self) -> int | None:
        """The most rows or messages of a batch, since one had to be made smaller."""
        return self._account.most

    @property
    def begun(self) -> int:
        """How often the open plan was begun without an error that explains its end."""
        return self._account.begun

    def begin_again(self) -> None:
        """Note that the open plan is run again."""
        with self._lock:
            self._note("again")

    def excuse(self) -> None:
        """Note that its batch ended with an error that has nothing to do with its size."""
        with self._lock:
            self._note("error")

    def replace(self, plan: Plan) -> None:
        """Give the open batch another plan. The store must have nothing of it."""
        with self._lock:
            if (open_plan := self.open_plan) is None or open_plan.batch != plan.batch:
                raise ValueError(f"batch {plan.batch} is not open")
            self._plan(plan)

    def finish(self, number: int) -> None:
        """Mark a batch as done, durably: it is in the store."""
        with self._lock:
            self._append({"done": number})
            plan = self.open_plan
            if plan is not None:
                self._needed += _bytes_of(set(plan.segments) - self._account.read)
            self._account.finish(number)
            if self._size > max(_COMPACT_BYTES, 2 * self._needed):
                self._compact()

    def read(self, last: int | None = None) -> set[str]:
        """The segments that were read; with ``last``, also those of a batch up to that one."""
        with self._lock:
            plan = self.open_plan
            if plan is None or last is None or plan.batch > last:
                return set(self._account.read)
            return {*self._account.read, *plan.segments}

    def offsets(self, topic: str, last: int | None = None) -> dict[int, int]:
        """By partition, the first message that was not read; ``last`` as for :meth:`read`."""
        with self._lock:
            offsets = dict(self._account.offsets.get(topic, {}))
            plan = self.open_plan
            if plan is not None and last is not None and plan.batch <= last and plan.topic == topic:
                offsets |= {partition: end for partition, (_, end) in plan.offsets.items()}
            return offsets

    def forget(self, paths: Collection[str]) -> None:
        """Leave out segments that do not exist any more."""
        with self._lock:
            self._needed -= _bytes_of(self._account.read.intersection(paths))
            self._account.read.difference_update(paths)
            self._left.update(map(os.path.dirname, paths))

    def _plan(self, plan: Plan) -> None:
        self._append(plan.line())
        self._account.add(plan)

    def _note(self, what: str) -> None:
        assert self.open_plan is not None
        line = {what: self.open_plan.batch}
        self._append(line)
        self._account.apply(line)

    def _append(self, line: Mapping[str, Any]) -> None:
        data = _encoded([line])
        append(self._file, self._size, data)
        self._size += len(data)

    def _compact(self) -> None:
        # After a power cut no segment may be there again that is not in the books any more.
        for folder in self._left:
            if Path(folder).is_dir():
                sync(folder)
        self._left.clear()
        data = _encoded(self._account.lines())
        write_whole(self._file, data)
        self._size = len(data)


def _bytes_of(paths: Iterable[str]) -> int:
    return sum(len(json.dumps(path)) + 2 for path in paths)


def _encoded(lines: Iterable[Mapping[str, Any]]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)
