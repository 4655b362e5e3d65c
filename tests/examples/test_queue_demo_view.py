"""The parts of the queue demo: its pipeline, its traffic, its meter, and what is drawn."""

from __future__ import annotations

import pytest

pytest.importorskip("rich")

from examples.queue_demo import demo, view
from examples.queue_demo.pipeline import METRIC_CLASSES, Pace, Pipeline, SlowSql, rates_per_s
from examples.queue_demo.view import Meter, Snapshot, balances
from tests.examples.kit import NAMES, drawn, queue, rebalanced_meter


def test_pipeline_brings_every_sample_to_the_database() -> None:
    """What L1 and L2 merged is passed on through shutdown: counts arrive whole."""
    with Pipeline(rebalance_interval_s=60) as pipeline:
        for index, metric in enumerate(METRIC_CLASSES):
            pipeline.l1.produce_many([metric("web", 1, 2.0)] * (index + 1))
    count = len(METRIC_CLASSES)
    assert pipeline.database.samples == count * (count + 1) // 2


def test_pipeline_merges_on_the_way() -> None:
    """Samples of one entity and class become one row."""
    with Pipeline(rebalance_interval_s=60) as pipeline:
        pipeline.l1.produce_many([METRIC_CLASSES[0]("web", 1, 2.0)] * 100)
    assert pipeline.database.rows == 1


def test_topn_keeps_the_ten_slowest() -> None:
    """Of many slow statements ten are written."""
    with Pipeline(rebalance_interval_s=60) as pipeline:
        pipeline.topn.produce_many([SlowSql(f"statement {n}", n) for n in range(200)])
    assert pipeline.database.rows == 10


def test_l1_classes_are_dealt_unevenly() -> None:
    """Dealt to four threads in turn, the busiest classes leave the threads uneven by 1.25."""
    rates = rates_per_s(1000)
    per_thread = [sum(rates[thread::4]) for thread in range(4)]
    assert max(per_thread) / min(per_thread) > 1.25


def test_rates_add_up() -> None:
    """The classes share the whole rate."""
    assert sum(rates_per_s(20_000)) == pytest.approx(20_000)


def test_pace_keeps_fractions() -> None:
    """A rate that gives no whole item per tick is kept over many ticks."""
    pace = Pace(0.25)
    assert [pace.items(1.0) for _ in range(8)] == [0, 0, 0, 1, 0, 0, 0, 1]


def test_rates_are_of_the_last_second() -> None:
    """A rate is the difference to the snapshot a second ago, not to the start."""
    meter = Meter(Snapshot(0.0, (queue(),)))
    meter.add(Snapshot(5.0, (queue(accepted=900, consumed=900),)))
    meter.add(Snapshot(7.0, (queue(accepted=1000, consumed=940),)))
    [rate] = meter.rates()
    assert (rate.accepted, rate.consumed) == (50, 20)


def test_rates_of_a_single_snapshot_are_zero() -> None:
    """With nothing to compare with there is no rate, and no error."""
    [rate] = Meter(Snapshot(0.0, (queue(),))).rates()
    assert (rate.accepted, rate.consumed) == (0, 0)


def test_loads_before_freeze_at_the_rebalance() -> None:
    """'Before' is what threads did up to the last snapshot without a rebalance."""
    before = rebalanced_meter().loads_before()
    assert before is not None
    assert before.shares == pytest.approx((0.8, 0.4))
    assert before.ratio == pytest.approx(2.0)


def test_loads_after_begin_with_the_rebalance() -> None:
    """'After' leaves out what threads did before the latest rebalance."""
    after = rebalanced_meter().loads_after()
    assert after is not None
    assert after.shares == pytest.approx((0.6, 0.6))


def test_no_loads_after_without_a_rebalance() -> None:
    """As long as nothing was moved there is no 'after'."""
    meter = Meter(Snapshot(0.0, (queue(),)))
    meter.add(Snapshot(1.0, (queue(busy=(0.8, 0.4)),)))
    assert meter.loads_after() is None


def test_ratio_of_a_thread_without_work_is_none() -> None:
    """A thread that did nothing makes no infinite ratio."""
    meter = Meter(Snapshot(0.0, (queue(),)))
    meter.add(Snapshot(1.0, (queue(busy=(0.8, 0.0)),)))
    loads = meter.loads_before()
    assert loads is not None
    assert loads.ratio is None


def test_queue_that_consumed_all_it_accepted_balances() -> None:
    """What was refused at the door is no part of the balance."""
    assert balances(queue(accepted=7, consumed=7, full=3))


@pytest.mark.parametrize("missing", ["pending", "failed", "unregistered"])
def test_queue_that_did_not_consume_all_does_not_balance(missing: str) -> None:
    """An accepted item that waits, failed, or found no handler breaks the balance."""
    short = queue(
        accepted=7,
        consumed=6,
        failed=int(missing == "failed"),
        unregistered=int(missing == "unregistered"),
    )
    assert not balances(short)


def test_view_fits_a_small_terminal() -> None:
    """Six-digit figures and all, the view stays within 80 by 24, line end and ^C line included."""
    lines = drawn(view.frame(rebalanced_meter(four=True), seconds=12, phase="x" * 80)).splitlines()
    assert len(lines) < 24
    assert max(map(len, lines)) <= 80


def test_view_cuts_nothing_in_a_small_terminal() -> None:
    """At 80 columns every column is there in full."""
    text = drawn(view.frame(rebalanced_meter(four=True), seconds=12, phase=""))
    assert "…" not in text
    for figure in (*NAMES, "full 12,345", "14 in 1", "max/min 2.00", "max/min 1.00"):
        assert figure in text


@pytest.mark.parametrize(
    "seconds_s", [0.0, 2.0, 5.0, 7.1, 11.0], ids=["start", "dealt", "moved", "burst", "steady"]
)
def test_phase_is_one_line(seconds_s: float) -> None:
    """What is said about the moment fits a line of 80, so that the view does not jump."""
    meter = Meter(Snapshot(0.0, (queue(),)))
    meter.add(Snapshot(seconds_s, (queue(rebalances=int(seconds_s > 4)),)))
    assert len(demo.Script(12).phase(meter)) <= 80


def test_closing_marks_what_does_not_balance() -> None:
    """A queue that lost an item has a cross, and the words say it is not equal."""
    lost = queue(accepted=7, consumed=6)
    text = drawn(view.summary([lost], rows=1, samples=6, before=None, after=None))
    assert f"✗ {NAMES[0]}: accepted 7 is not consumed 6" in text


def test_closing_marks_samples_that_did_not_arrive() -> None:
    """Fewer samples in the database than L1 consumed is a cross."""
    fine = queue(accepted=7, consumed=7)
    text = drawn(view.summary([fine], rows=1, samples=6, before=None, after=None))
    assert "✗ end to end" in text


@pytest.mark.parametrize(
    ("share", "bar"),
    [(0.0, "░░░░"), (0.0001, "▏░░░"), (0.5, "██░░"), (0.625, "██▌░"), (1.0, "████"), (3, "████")],
)
def test_bar_is_as_long_as_its_share(share: float, bar: str) -> None:
    """A bar goes in eighths; a little is never drawn as nothing, nor too much as more than all."""
    assert view.Bar(share, "").draw(4).plain == bar


@pytest.mark.parametrize(("share", "bar"), [(0.0, "...."), (0.01, "#..."), (1.0, "####")])
def test_bar_in_ascii(share: float, bar: str) -> None:
    """Without block characters a bar has its full width too."""
    assert view.Bar(share, "").draw(4, ascii_only=True).plain == bar


def test_drops_are_shown_by_reason() -> None:
    """Each reason that occurred is named with its count, the others are not."""
    dropped = queue(full=1200, unregistered=3).dropped
    assert view.drop_text(dropped) == "full 1,200, unregistered 3"
