"""The books of a soak: what is lost, counted twice or unexplained is a problem."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.soak.balance import (
    AHEAD,
    LATE_COPY_S,
    ClockMove,
    Counted,
    Request,
    Sent,
    balance,
    counted_of,
    sent_of,
)

SENT = Sent(spans=1000, acknowledged=1000, repeated=200, calls={7: 300, 8: 100})
COUNTED = Counted(spans=1000, duplicates=200, quarantined={}, calls={7: 300, 8: 100})
REQUEST = Request(made_s=1000.0, acknowledged_s=1001.0, spans=100, calls={16: 40})
MOVE = ClockMove(began_s=2030.0, ended_s=2100.0, unread_since_s=2000.0, is_ahead=False)


def problems(sent: Sent, counted: Counted) -> tuple[str, ...]:
    """What is wrong with the books."""
    return balance("main", sent, counted).problems


def test_equal_books_are_no_problem() -> None:
    """The line has all figures."""
    books = balance("main", SENT, COUNTED)
    assert books.problems == ()
    assert books.text == (
        "main: 1,000 sent, 1,000 acknowledged, 1,000 counted, 200 duplicates dropped of 200 sent "
        "again, 400 calls in the metrics"
    )


@pytest.mark.parametrize(
    "change",
    [
        {"spans": 999},
        {"spans": 1001},
        {"duplicates": 201},
        {"quarantined": {"no time": 1}},
        {"lost_segments": 1},
        {"expired": 1},
        {"calls": {7: 300, 8: 99}},
        {"calls": {7: 299, 8: 101}},
        {"calls": {7: 300, 8: 100, 9: 1}},
    ],
    ids=str,
)
def test_each_difference_is_a_problem(change: dict[str, Any]) -> None:
    """A span too few, one too many, one left out, a call that is in no metric or a wrong minute."""
    assert problems(SENT, replace(COUNTED, **change))


def test_a_span_that_was_never_acknowledged_is_a_problem() -> None:
    """Senders have pressed on until the end."""
    sent = replace(SENT, acknowledged=999)
    assert problems(sent, replace(COUNTED, spans=999)) == ("1 spans were never acknowledged",)


def test_spans_of_a_wrong_clock_are_quarantined_once_for_each_delivery() -> None:
    """Not more, and not less."""
    sent = replace(SENT, ahead=100, repeated_ahead=20)
    counted = replace(COUNTED, spans=900)
    assert problems(sent, replace(counted, quarantined={AHEAD: 100})) == ()
    assert problems(sent, replace(counted, quarantined={AHEAD: 120})) == ()
    assert problems(sent, replace(counted, quarantined={AHEAD: 99}))
    assert problems(sent, replace(counted, quarantined={AHEAD: 121}))


def test_near_a_clock_move_spans_may_count_or_be_quarantined_but_none_is_missing() -> None:
    """Away from it, minutes are compared exactly, and nothing counts twice."""
    sent = sent_of(
        [
            replace(REQUEST, spans=700, calls={16: 280}),
            replace(REQUEST, made_s=2050.0, acknowledged_s=2051.0, repeated=1, calls={34: 40}),
        ],
        [MOVE],
    )
    good = Counted(spans=800, quarantined={}, calls={16: 280, 34: 40})
    assert problems(sent, good) == ()
    assert "100 spans near a clock move, 78% of the calls" in balance("main", sent, good).text
    assert problems(sent, replace(good, spans=700, quarantined={AHEAD: 100}, calls={16: 280})) == ()
    assert problems(sent, replace(good, spans=900, calls={16: 280, 34: 80})) == ()
    for spans, ahead, calls in (
        (799, 0, {16: 280, 34: 40}),  # a span is missing
        (901, 0, {16: 280, 34: 40}),  # one counts twice that was sent once
        (600, 201, {16: 280, 34: 40}),  # one is quarantined that was away from the move
        (800, 0, {16: 279, 34: 40}),  # its call is missing
        (800, 0, {16: 280, 34: 81}),
    ):
        counted = replace(good, spans=spans, quarantined={AHEAD: ahead}, calls=calls)
        assert problems(sent, counted), counted


@pytest.mark.parametrize(
    ("change", "near"),
    [
        ({"acknowledged_s": 1999.0 - LATE_COPY_S}, False),
        ({"acknowledged_s": 2001.0 - LATE_COPY_S}, True),
        ({"acknowledged_s": None}, True),
        ({"made_s": 2101.0, "acknowledged_s": 2102.0}, True),
        ({"made_s": 2110.0, "acknowledged_s": 2111.0}, False),
    ],
    ids=str,
)
def test_a_clock_move_concerns_what_was_not_read_before_it(
    change: dict[str, Any], near: bool
) -> None:
    """Up to its end; and what may have been stored a second time by then."""
    sent = sent_of([replace(REQUEST, **change)], [MOVE])
    assert (sent.near, sent.open_minutes) == ((100, {16}) if near else (0, set()))


def test_a_clock_that_is_ahead_concerns_what_was_made_by_it_or_sent_again() -> None:
    """What had the right time counts, though it is old by that clock."""
    ahead = replace(MOVE, is_ahead=True)
    before = replace(REQUEST, made_s=2010.0, acknowledged_s=2011.0)
    assert MOVE.may_concern(before)
    assert not ahead.may_concern(before)
    assert ahead.may_concern(replace(before, repeated=1))
    assert ahead.may_concern(replace(before, made_s=2031.0))


def test_after_a_clock_move_spans_of_days_ago_may_count() -> None:
    """The store trusts a clock that has jumped ahead only after hours."""
    old = replace(REQUEST, skew_days=-40, calls={3: 40})
    assert problems(sent_of([old]), Counted(spans=100, quarantined={}, calls={3: 40}))
    sent = sent_of([old, replace(REQUEST, calls={16: 90})], [MOVE])
    assert problems(sent, Counted(spans=200, quarantined={}, calls={3: 40, 16: 90})) == ()
    assert problems(sent, Counted(spans=200, quarantined={}, calls={16: 90}, expired=9)) == ()


def test_books_that_compare_hardly_anything_are_a_problem() -> None:
    """They would be equal whatever happened."""
    sent = sent_of([replace(REQUEST, made_s=2050.0, acknowledged_s=2051.0)], [MOVE])
    (problem,) = problems(sent, Counted(spans=100, quarantined={}, calls={16: 40}))
    assert problem.startswith("only 0% of the calls")


def test_counters_of_other_sources_do_not_count() -> None:
    """Rows of Service are made of spans."""
    counters = {
        ("rows", "Span", ""): 5,
        ("rows", "Service", ""): 3,
        ("duplicates", "Span", "same trace and span id"): 2,
        ("quarantined", "Span", AHEAD): 1,
        ("expired", "Service", ""): 4,
    }
    assert counted_of(counters, {7: 3}) == Counted(
        spans=5, duplicates=2, quarantined={AHEAD: 1}, expired=4, calls={7: 3}
    )
