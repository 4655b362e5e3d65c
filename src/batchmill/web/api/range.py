"""Which time is asked about: from, to, and the grain of what is shown; and which rows cover it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from batchmill.sources import Grain, bucket_end
from batchmill.store import Buckets
from batchmill.web.errors import BadQuestion

MOST_BUCKETS = 1_500
MINUTE_S = 60
SIZES_S = {each: MINUTE_S * each.minutes for each in Grain}
_LAST_S = 253_402_300_800  # the year 10000
_LONGEST = 64
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_RELATIVE = re.compile(r"now(?:-([0-9]{1,9})([smhdw]))?", re.ASCII)
_SECONDS = re.compile(r"[0-9]{1,12}(?:\.[0-9]{1,9})?", re.ASCII)
_ALLOWED = (
    "seconds since 1970, ISO 8601 such as 2024-02-29T13:45:00Z, now, or now-24h "
    "(s, m, h, d, w), between the years 1970 and 9999"
)
_AUTO = ((3 * 3600, Grain.MINUTE), (7 * 86_400, Grain.HOUR))
"""Up to how long a range has which grain, if none is asked for; a longer one has days."""


@dataclass(frozen=True, slots=True)
class Range:
    """Whole minutes from ``start_s``, included, to ``end_s``, excluded, shown in ``grain``."""

    start_s: int
    end_s: int
    grain: Grain

    @property
    def buckets(self) -> Buckets:
        """The buckets that any minute of it lies in; the first and the last may begin before it,
        or end behind it."""
        return Buckets(
            self.grain, bucket(self.grain, self.start_s), bucket(self.grain, self.end_s - 1)
        )

    @property
    def times(self) -> list[int]:
        """When each bucket begins, in seconds since 1970."""
        size = SIZES_S[self.grain]
        return list(range(self.start_s // size * size, self.end_s, size))

    def minutes(self, newest: int | None) -> int:
        """How many minutes it has, up to the newest that has come in; at least 1."""
        end_s = self.end_s if newest is None else min(self.end_s, minute_end_s(newest))
        return max(1, (end_s - self.start_s) // MINUTE_S)

    def cover(
        self, newest: int | None, coarsest: Grain = Grain.DAY, *, less: bool = False
    ) -> Cover:
        """Buckets that together are just these minutes: coarse ones inside, minutes at the ends.

        With ``less``, a coarse bucket at an end may be taken whole, and what does not belong to the
        range taken away, where that is the smaller part. Behind the ``newest`` minute there is
        nothing, so that an end behind that is no ragged one.
        """
        if newest is None or self.start_s >= minute_end_s(newest):
            return Cover([], [])
        newest_end_s = minute_end_s(newest)
        end_s = self.end_s
        if end_s >= newest_end_s:
            end_s = _up(newest_end_s, SIZES_S[coarsest])
        found = Cover([], [])
        _cover(self.start_s, end_s, coarsest, found, less)
        return found


@dataclass(frozen=True, slots=True)
class Cover:
    """Which rows make a range."""

    more: list[Buckets]
    """To be added up."""
    less: list[Buckets]
    """To be taken away from that."""

    def flipped(self) -> Cover:
        """The other way round; the lists are the same."""
        return Cover(self.less, self.more)


def _cover(start_s: int, end_s: int, grain: Grain, into: Cover, less: bool) -> None:
    if start_s >= end_s:
        return
    size = SIZES_S[grain]
    first, last = _up(start_s, size), end_s // size * size
    if first > last or (first == last and not less):
        _cover(start_s, end_s, _FINER[grain], into, less)
        return
    # Whether the ends are taken with more than belongs to them.
    before = less and first - start_s > size // 2
    behind = less and end_s - last > size // 2
    outer, inner = (first - size if before else first), (last + size if behind else last)
    if outer >= inner:
        _cover(start_s, end_s, _FINER[grain], into, less)
        return
    into.more.append(Buckets(grain, bucket(grain, outer), bucket(grain, inner - 1)))
    if grain is Grain.MINUTE:
        return
    finer = _FINER[grain]
    if before:
        _cover(outer, start_s, finer, into.flipped(), less)
    else:
        _cover(start_s, first, finer, into, less)
    if behind:
        _cover(end_s, inner, finer, into.flipped(), less)
    else:
        _cover(last, end_s, finer, into, less)


_FINER = {Grain.DAY: Grain.HOUR, Grain.HOUR: Grain.MINUTE}


def _up(moment_s: int, size_s: int) -> int:
    return -(-moment_s // size_s) * size_s


def bucket(grain: Grain, moment_s: int) -> int:
    """The bucket that a moment lies in."""
    return grain.bucket(datetime.fromtimestamp(moment_s, UTC))


def minute_end_s(minute: int) -> int:
    """When a minute is over, in seconds since 1970."""
    return int(bucket_end(minute).timestamp())


def read_range(params: Mapping[str, str], now_s: float) -> Range:
    """The range that parameters ask for."""
    start = read_moment("from", params.get("from", "now-1h"), now_s)
    end = read_moment("to", params.get("to", "now"), now_s)
    start_s = math.floor(start / MINUTE_S) * MINUTE_S
    end_s = math.ceil(end / MINUTE_S) * MINUTE_S
    if start_s >= end_s or start > end:
        raise BadQuestion("from must lie before to")
    grain = _grain(params.get("grain", "auto"), end_s - start_s)
    found = Range(start_s, end_s, grain)
    count = (end_s - start_s) // SIZES_S[grain] + 1
    if count > MOST_BUCKETS and len(found.times) > MOST_BUCKETS:
        raise BadQuestion(
            f"that are {len(found.times):,} buckets of one {grain.value}, and {MOST_BUCKETS:,} are "
            "answered at most: ask for a shorter range or a coarser grain"
        )
    return found


def read_moment(name: str, text: str, now_s: float) -> float:
    """A moment in seconds since 1970, from how a parameter writes it."""
    text = text.strip()
    if relative := _RELATIVE.fullmatch(text):
        ago = int(relative[1]) * _UNITS_S[relative[2]] if relative[1] else 0
        found = now_s - ago
    elif _SECONDS.fullmatch(text):
        found = float(text)
    else:
        found = _calendar(name, text)
    if not 0 <= found < _LAST_S:
        raise _wrong(name, text)
    return found


def _calendar(name: str, text: str) -> float:
    if len(text) > _LONGEST or not text[:4].isdigit():
        raise _wrong(name, text)
    try:
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        return moment.timestamp()
    except (ValueError, OverflowError):
        raise _wrong(name, text) from None


def _wrong(name: str, text: str) -> BadQuestion:
    return BadQuestion(f"{name}={text[:_LONGEST]!r} is not valid: it must be {_ALLOWED}")


def _grain(text: str, length_s: int) -> Grain:
    if text == "auto":
        return next((grain for most_s, grain in _AUTO if length_s <= most_s), Grain.DAY)
    try:
        return Grain(text)
    except ValueError:
        raise BadQuestion(
            f"grain={text[:_LONGEST]!r} is not valid: it must be minute, hour, day or auto"
        ) from None
