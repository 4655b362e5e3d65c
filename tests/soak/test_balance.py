"""The books of a soak: what is lost, counted twice or unexplained is a problem."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.soak.balance import AHEAD, Counted, Sent, balance, counted_of

SENT = Sent(spans=1000, acknowledged=1000, repeated=200, served=400)
COUNTED = Counted(spans=1000, duplicates=200, quarantined={}, calls=400)


def problems(sent: Sent, counted: Counted, *, clock_moved: bool = False) -> tuple[str, ...]:
    """What is wrong with the books."""
    return balance("main", sent, counted, clock_moved=clock_moved).problems


def test_equal_books_are_no_problem() -> None:
    """The line has all figures."""
    books = balance("main", SENT, COUNTED, clock_moved=False)
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
        {"calls": 399},
    ],
    ids=lambda change: next(iter(change)),
)
def test_each_difference_is_a_problem(change: dict[str, Any]) -> None:
    """A span too few, one too many, one left out, a call that is in no metric."""
    assert problems(SENT, replace(COUNTED, **change))


def test_a_span_that_was_never_acknowledged_is_a_problem() -> None:
    """Senders have pressed on until the end."""
    sent = replace(SENT, acknowledged=999)
    assert problems(sent, replace(COUNTED, spans=999)) == ("1 spans were never acknowledged",)


def test_spans_of_a_wrong_clock_are_quarantined_once_for_each_delivery() -> None:
    """Not more, and not less."""
    sent = replace(SENT, ahead=100, served_ahead=40, repeated_ahead=20)
    counted = replace(COUNTED, spans=900, calls=360)
    assert problems(sent, replace(counted, quarantined={AHEAD: 100})) == ()
    assert problems(sent, replace(counted, quarantined={AHEAD: 120})) == ()
    assert problems(sent, replace(counted, quarantined={AHEAD: 99}))
    assert problems(sent, replace(counted, quarantined={AHEAD: 121}))


def test_with_a_machine_whose_clock_moved_every_span_still_has_a_reason() -> None:
    """How many were called too old or too new is not known, but none is missing."""
    counted = replace(COUNTED, spans=700, calls=0, expired=50, quarantined={AHEAD: 300})
    assert problems(SENT, counted, clock_moved=True) == ()
    assert problems(SENT, replace(counted, spans=699), clock_moved=True)


def test_counters_of_other_sources_do_not_count() -> None:
    """Rows of Service are made of spans."""
    counters = {
        ("rows", "Span", ""): 5,
        ("rows", "Service", ""): 3,
        ("duplicates", "Span", "same trace and span id"): 2,
        ("quarantined", "Span", AHEAD): 1,
        ("expired", "Service", ""): 4,
    }
    assert counted_of(counters, 3) == Counted(
        spans=5, duplicates=2, quarantined={AHEAD: 1}, expired=4, calls=3
    )
