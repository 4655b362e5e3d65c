"""Which time is asked about: moments, grains, and buckets that cover just the minutes wanted."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchmill.sources import Grain, bucket_start
from batchmill.store import Buckets
from batchmill.web.api.parameters import TimeRange, bucket, read_moment, read_range
from batchmill.web.responses import BadRequest

NOW_S = 1_709_214_330.5  # 2024-02-29T13:45:30.5Z
DAY_S = 86_400


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("1709208000", 1_709_208_000.0),
        ("1709208000.25", 1_709_208_000.25),
        ("now", NOW_S),
        ("now-15m", NOW_S - 900),
        ("now-24h", NOW_S - DAY_S),
        ("now-2w", NOW_S - 14 * DAY_S),
        ("2024-02-29T12:00:00Z", 1_709_208_000.0),
        ("2024-02-29T13:00:00+01:00", 1_709_208_000.0),
        ("2024-02-29T12:00", 1_709_208_000.0),
        ("2024-02-29", 1_709_164_800.0),
    ],
)
def test_moments_are_understood(text: str, moment: float) -> None:
    """Seconds, ISO 8601 (UTC unless it says otherwise), and so long before now."""
    assert read_moment("from", text, NOW_S) == moment


@pytest.mark.parametrize(
    "text",
    ["yesterday", "now+1h", "now-1y", "-5", "1e9", "9" * 13, "2024-02-30", "0001-01-01", "²", "٣"],
)
def test_other_moments_are_refused_with_what_is_allowed(text: str) -> None:
    """Whatever is no moment is answered with how one is written."""
    with pytest.raises(BadRequest, match="it must be seconds since 1970"):
        read_moment("from", text, NOW_S)


@pytest.mark.parametrize(
    ("length", "grain"),
    [("3h", Grain.MINUTE), ("4h", Grain.HOUR), ("7d", Grain.HOUR), ("8d", Grain.DAY)],
)
def test_the_grain_follows_the_length(length: str, grain: Grain) -> None:
    """Minutes up to 3 hours, hours up to 7 days, days beyond."""
    whole_s = 1_709_208_000.0
    assert read_range({"from": f"now-{length}"}, whole_s).grain is grain


def test_without_parameters_it_is_the_last_hour() -> None:
    """From an hour ago to the minute that is now, in minutes."""
    time_range = read_range({}, NOW_S)
    assert (time_range.start_s, time_range.end_s) == (1_709_210_700, 1_709_214_360)
    assert len(time_range.times) == 61


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"from": "now", "to": "now-1h"}, "from must lie before to"),
        ({"from": "now-2d", "grain": "minute"}, "2,881 buckets of one minute, and at most 1,500"),
        ({"grain": "week"}, "minute, 5m, 10m, hour, day or auto"),
    ],
)
def test_what_cannot_be_answered_is_refused(params: dict[str, str], reason: str) -> None:
    """A range the wrong way round, too many buckets, a grain that there is not."""
    with pytest.raises(BadRequest, match=reason):
        read_range(params, NOW_S)


def test_as_many_buckets_as_are_allowed_are_answered() -> None:
    """1,500 minutes are not too many."""
    time_range = read_range({"from": "now-1500m", "grain": "minute"}, 1_709_208_000.0)
    assert len(time_range.times) == len(time_range.buckets) == 1500


def _minutes(pieces: list[Buckets]) -> Counter[int]:
    counts: Counter[int] = Counter()
    for piece in pieces:
        for one in piece:
            first_s = int(bucket_start(one).timestamp())
            counts.update(range(first_s, first_s + piece.grain.minutes * 60, 60))
    return counts


@given(
    st.integers(0, 4 * 1440),
    st.integers(1, 4 * 1440),
    st.integers(0, 5 * 1440),
    st.sampled_from(Grain),
    st.booleans(),
)
def test_the_cover_is_just_the_minutes_of_the_range(
    start: int, length: int, newest: int, coarsest: Grain, less: bool
) -> None:
    """Every minute up to the newest counts exactly once, and none outside the range."""
    base_s = 1_709_078_400  # a midnight
    wanted = TimeRange(base_s + start * 60, base_s + (start + length) * 60, Grain.MINUTE)
    newest_s = base_s + newest * 60
    cover = wanted.cover(bucket(Grain.MINUTE, newest_s), coarsest, less=less)
    assert all(buckets.grain.minutes <= coarsest.minutes for buckets in (*cover.more, *cover.less))
    assert less or not cover.less
    minutes = _minutes(cover.more)
    minutes.subtract(_minutes(cover.less))
    there = {minute_s for minute_s, count in minutes.items() if count and minute_s <= newest_s}
    assert there == set(range(wanted.start_s, min(wanted.end_s, newest_s + 60), 60))
    assert all(minutes[place] == 1 for place in there)


def test_what_is_taken_away_is_the_smaller_part() -> None:
    """From an hour's sixth minute on: the hour without five minutes, not 55 minutes."""
    base_s = 1_709_078_400
    wanted = TimeRange(base_s + 5 * 60, base_s + 3 * 3600 + 10 * 60, Grain.HOUR)
    cover = wanted.cover(bucket(Grain.MINUTE, base_s + DAY_S), Grain.HOUR, less=True)
    assert [(buckets.grain.value, len(buckets)) for buckets in cover.more] == [
        ("hour", 3),
        ("minute", 10),
    ]
    assert [(buckets.grain.value, len(buckets)) for buckets in cover.less] == [("minute", 5)]


def test_a_long_range_is_covered_by_coarse_buckets() -> None:
    """Thirty days with ragged ends take minutes of two hours, hours of two days, and days."""
    base_s = 1_709_078_400
    wanted = TimeRange(base_s + 5 * 60, base_s + 30 * DAY_S + 90 * 60, Grain.DAY)
    pieces = wanted.cover(bucket(Grain.MINUTE, base_s + 40 * DAY_S)).more
    assert [(piece.grain.value, len(piece)) for piece in pieces] == [
        ("day", 29),
        ("hour", 23),
        ("minute", 55),
        ("hour", 1),
        ("minute", 30),
    ]


@pytest.mark.parametrize(("grain", "minutes"), [("5m", 5), ("10m", 10), ("hour", 60)])
def test_points_begin_at_multiples_of_their_length(grain: str, minutes: int) -> None:
    """However the range begins; their buckets are all those of whole points."""
    start_s = 1_709_208_000 + 7 * 60
    params = {"from": str(start_s), "to": str(start_s + 7200), "grain": grain}
    time_range = read_range(params, start_s + 7200)
    assert time_range.step == grain
    assert time_range.step_minutes == minutes
    assert all(time % (60 * minutes) == 0 for time in time_range.times)
    assert time_range.times[0] <= start_s < time_range.times[0] + 60 * minutes
    per_point = 1 if grain == "hour" else minutes
    assert len(time_range.buckets) > per_point * (len(time_range.times) - 1)
