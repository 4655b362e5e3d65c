"""Parameters of a request: validation, the time range, and the buckets that cover it."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from starlette.datastructures import QueryParams

from batchmill.sources import Grain, bucket_end
from batchmill.store import Buckets
from batchmill.web.responses import BadRequest

LONGEST = 4_096
"""Characters of one parameter."""


def read_params(
    given: QueryParams, known: Collection[str], repeated: Collection[str] = ()
) -> dict[str, str]:
    """The parameters by name; an empty one counts as not given.

    One that may be ``repeated`` is checked here, and read by :func:`read_list`.
    """
    params: dict[str, str] = {}
    for name, value in given.multi_items():
        if name not in known:
            allowed = ", ".join(known) or "none"
            raise BadRequest(f"{name[:64]!r} is no parameter here: there are {allowed}")
        if name in params and name not in repeated:
            raise BadRequest(f"{name} is given twice")
        if len(value) > LONGEST:
            raise BadRequest(f"{name} has more than {LONGEST:,} characters")
        params[name] = checked(name, value)
    return {name: value for name, value in params.items() if value}


def read_list(given: QueryParams, name: str, most: int) -> list[str]:
    """All values of a parameter that may be repeated, each once, without empty ones."""
    values = list(dict.fromkeys(value for value in given.getlist(name) if value))
    if len(values) > most:
        raise BadRequest(f"{name} is given {len(values):,} times: at most {most:,} are allowed")
    return values


def checked(name: str, text: str) -> str:
    """The text, if a database accepts it in a query."""
    if "\0" in text:
        raise BadRequest(f"{name} holds a NUL character")
    return text


def whole(params: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    """A whole number."""
    text = params.get(name)
    if text is None:
        return default
    if text.isascii() and text.isdigit() and len(text) < 19 and least <= int(text) <= most:
        return int(text)
    raise BadRequest(
        f"{name}={text[:64]!r} is not valid: it must be a whole number from {least:,} to {most:,}"
    )


def choice(params: Mapping[str, str], name: str, default: str, allowed: Collection[str]) -> str:
    """One of a few words."""
    text = params.get(name, default)
    if text not in allowed:
        raise BadRequest(f"{name}={text[:64]!r} is not valid: it must be {', '.join(allowed)}")
    return text


MOST_BUCKETS = 1_500
MINUTE_S = 60
SIZES_S = {grain: MINUTE_S * grain.minutes for grain in Grain}
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
"""The default grain by the length of the range; a longer range has days."""
STEPS = {
    **{grain.value: (grain, 1) for grain in Grain},
    "5m": (Grain.MINUTE, 5),
    "10m": (Grain.MINUTE, 10),
}
"""What the parameter ``grain`` may be: a stored grain, and how many of its buckets make a point."""


@dataclass(frozen=True, slots=True)
class TimeRange:
    """Whole minutes from ``start_s``, included, to ``end_s``, excluded, shown in ``grain``."""

    start_s: int
    end_s: int
    grain: Grain
    now_s: float = _LAST_S
    """When it was requested: what is newer than that is not complete."""
    merged: int = 1
    """Buckets of ``grain`` that make one point."""

    @property
    def step(self) -> str:
        """The length of a point, as the parameter ``grain`` names it."""
        return next(name for name, step in STEPS.items() if step == (self.grain, self.merged))

    @property
    def step_minutes(self) -> int:
        """The length of a point in minutes."""
        return self.grain.minutes * self.merged

    @property
    def buckets(self) -> Buckets:
        """All buckets of points that overlap the range; the first may start before it."""
        first_s, last_s = self.starts[0], self.end_s - 1
        return Buckets(self.grain, bucket(self.grain, first_s), bucket(self.grain, last_s))

    @property
    def times(self) -> list[int]:
        """The start of each point, in seconds since 1970."""
        return list(self.starts)

    @property
    def starts(self) -> range:
        """The same, of a range of any length."""
        size = SIZES_S[self.grain] * self.merged
        return range(self.start_s // size * size, self.end_s, size)

    def cover(
        self, newest: int | None, coarsest: Grain = Grain.DAY, *, less: bool = False
    ) -> Cover:
        """Buckets that add up to exactly these minutes: coarse ones inside, minutes at the ends.

        With ``less``, a coarse bucket at an end may be added whole and its part outside of the
        range subtracted, where that part is the smaller one. After the ``newest`` minute there is
        no data, so an end after it needs no finer buckets.
        """
        if newest is None or self.start_s >= minute_end_s(newest):
            return Cover([], [])
        newest_end_s = minute_end_s(newest)
        end_s = self.end_s
        if end_s >= newest_end_s:
            end_s = _up(newest_end_s, SIZES_S[coarsest])
        cover = Cover([], [])
        _cover(self.start_s, end_s, coarsest, cover, less)
        return cover


@dataclass(frozen=True, slots=True)
class Cover:
    """The buckets that make up a range."""

    more: list[Buckets]
    """To add."""
    less: list[Buckets]
    """To subtract from that."""

    def flipped(self) -> Cover:
        """The same lists with their roles exchanged."""
        return Cover(self.less, self.more)


def _cover(start_s: int, end_s: int, grain: Grain, into: Cover, less: bool) -> None:
    if start_s >= end_s:
        return
    size = SIZES_S[grain]
    first, last = _up(start_s, size), end_s // size * size
    if first > last or (first == last and not less):
        _cover(start_s, end_s, _FINER[grain], into, less)
        return
    # Whether an end is covered by a whole bucket, and the rest subtracted.
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
    """The bucket that contains a time."""
    return grain.bucket(datetime.fromtimestamp(moment_s, UTC))


def minute_end_s(minute: int) -> int:
    """The end of a minute, in seconds since 1970."""
    return int(bucket_end(minute).timestamp())


def read_range(params: Mapping[str, str], now_s: float) -> TimeRange:
    """The time range from the parameters ``from``, ``to`` and ``grain``."""
    start = read_moment("from", params.get("from", "now-1h"), now_s)
    end = read_moment("to", params.get("to", "now"), now_s)
    start_s = math.floor(start / MINUTE_S) * MINUTE_S
    end_s = math.ceil(end / MINUTE_S) * MINUTE_S
    if start_s >= end_s or start > end:
        raise BadRequest("from must lie before to")
    grain, merged = _step(params.get("grain", "auto"), end_s - start_s)
    time_range = TimeRange(start_s, end_s, grain, now_s, merged)
    if len(time_range.starts) > MOST_BUCKETS:
        length = f"{merged} minutes" if merged > 1 else f"one {grain.value}"
        raise BadRequest(
            f"the range has {len(time_range.starts):,} buckets of {length}, and at most "
            f"{MOST_BUCKETS:,} are allowed: request a shorter range or a coarser grain"
        )
    return time_range


COMPARES = {"before": None, "1d": 86_400, "1w": 7 * 86_400}
"""What a range may be compared with: how long before it, if not just as long as it is."""


def earlier(time_range: TimeRange, compare: str) -> TimeRange:
    """The range to compare with: as many points, whole ones before."""
    size_s = time_range.step_minutes * MINUTE_S
    back_s = COMPARES[compare] or _up(time_range.end_s - time_range.start_s, size_s)
    if back_s > time_range.start_s:
        raise BadRequest(f"compare={compare} is not valid: that is before the year 1970")
    return replace(time_range, start_s=time_range.start_s - back_s, end_s=time_range.end_s - back_s)


def read_moment(name: str, text: str, now_s: float) -> float:
    """A time in seconds since 1970, from any form that a parameter may have."""
    text = text.strip()
    if relative := _RELATIVE.fullmatch(text):
        ago = int(relative[1]) * _UNITS_S[relative[2]] if relative[1] else 0
        moment_s = now_s - ago
    elif _SECONDS.fullmatch(text):
        moment_s = float(text)
    else:
        moment_s = _calendar(name, text)
    if not 0 <= moment_s < _LAST_S:
        raise _invalid(name, text)
    return moment_s


def _calendar(name: str, text: str) -> float:
    if len(text) > _LONGEST or not text[:4].isdigit():
        raise _invalid(name, text)
    try:
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        return moment.timestamp()
    except (ValueError, OverflowError):
        raise _invalid(name, text) from None


def _invalid(name: str, text: str) -> BadRequest:
    return BadRequest(f"{name}={text[:_LONGEST]!r} is not valid: it must be {_ALLOWED}")


def _step(text: str, length_s: int) -> tuple[Grain, int]:
    if text == "auto":
        grain = next((grain for most_s, grain in _AUTO if length_s <= most_s), Grain.DAY)
        return grain, 1
    if text not in STEPS:
        raise BadRequest(
            f"grain={text[:_LONGEST]!r} is not valid: it must be minute, 5m, 10m, hour, day or auto"
        )
    return STEPS[text]
