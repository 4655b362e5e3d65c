"""Levels: where they begin, and that each is entered and left once."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from batchmill.pressure import ThresholdLevel
from batchmill.pressure.levels import LevelTracker, Thresholds

WARNING, CRITICAL, PLUS = ThresholdLevel


@pytest.mark.parametrize(
    ("depth", "level"),
    [
        (0, None),
        (499, None),
        (500, WARNING),
        (999, WARNING),
        (1000, CRITICAL),
        (1499, CRITICAL),
        (1500, PLUS),
        (10**9, PLUS),
    ],
)
def test_a_level_begins_at_its_threshold(depth: int, level: ThresholdLevel | None) -> None:
    """The threshold itself belongs to the level; one below does not."""
    assert Thresholds(500, 1000, 1500).level_at(depth) is level


def test_levels_compare_by_severity() -> None:
    """A higher level is greater, so that code can say "at CRITICAL or above"."""
    assert WARNING < CRITICAL < PLUS


def test_equal_thresholds_give_the_higher_level() -> None:
    """Where two levels begin at the same depth, the more severe one holds."""
    assert Thresholds(5, 5, 9).level_at(5) is CRITICAL


def test_each_level_knows_its_threshold() -> None:
    """of() is the inverse of level_at() at the boundaries."""
    assert [Thresholds(1, 2, 3).of(level) for level in ThresholdLevel] == [1, 2, 3]


def test_a_jump_enters_every_level_on_the_way() -> None:
    """Lowest first; falling back leaves them, highest first."""
    tracker = LevelTracker(Thresholds(10, 20, 30), 0.9)
    assert tracker.move(35) == ([WARNING, CRITICAL, PLUS], [])
    assert tracker.move(0) == ([], [PLUS, CRITICAL, WARNING])


def test_a_depth_that_trembles_is_one_stay() -> None:
    """Just below the threshold the level still holds; only below the leave ratio it is left."""
    tracker = LevelTracker(Thresholds(10, 20, 30), 0.5)
    assert tracker.move(10) == ([WARNING], [])
    assert [tracker.move(depth) for depth in (9, 10, 5, 10)] == [([], [])] * 4
    assert tracker.move(4) == ([], [WARNING])


class Tracking(RuleBasedStateMachine):
    """LevelTracker against a plain model: a set of levels that hold."""

    @initialize(
        marks=st.tuples(*[st.integers(1, 30)] * 3).map(sorted), ratio=st.sampled_from([0.3, 0.9, 1])
    )
    def begin(self, marks: list[int], ratio: float) -> None:
        self.thresholds = Thresholds(*marks)
        self.ratio = ratio
        self.tracker = LevelTracker(self.thresholds, ratio)
        self.holding: set[ThresholdLevel] = set()

    @rule(depth=st.integers(0, 40))
    def move(self, depth: int) -> None:
        before = set(self.holding)
        for level in ThresholdLevel:
            mark = self.thresholds.of(level)
            if depth >= mark:
                self.holding.add(level)
        for level in reversed(ThresholdLevel):
            left = depth < self.thresholds.of(level) * self.ratio
            if left and level in self.holding and level == max(self.holding):
                self.holding.discard(level)
        settled = self.tracker.settled(depth)
        entered, left_levels = self.tracker.move(depth)
        assert settled == (before == self.holding and not entered and not left_levels)
        assert entered == sorted(self.holding - before)
        assert left_levels == sorted(before - self.holding, reverse=True)

    @invariant()
    def the_highest_that_holds_is_current(self) -> None:
        if hasattr(self, "tracker"):
            assert self.tracker.current == max(self.holding, default=0)


Tracking.TestCase.settings = settings(max_examples=100, deadline=None)
TestTracking = Tracking.TestCase
