"""The spans of a trace as a tree, and what its duration consists of."""

from __future__ import annotations

import random
from typing import Any

import pytest

from batchmill.traces import Trace, TraceSpan


def _span(own: str, parent: str | None, start: int, end: int, **given: Any) -> TraceSpan:
    service, kind = given.pop("service", "shop"), given.pop("kind", "SERVER")
    return TraceSpan("t", own, parent, start, end - start, service, own, kind, "UNSET", **given)


def _trace(*spans: TraceSpan) -> Trace:
    trace = Trace.of(spans)
    assert trace is not None
    return trace


def _critical(trace: Trace) -> dict[str, list[tuple[int, int]]]:
    return {
        span.span_id: list(parts)
        for span, parts in zip(trace.spans, trace.critical, strict=True)
        if parts
    }


def test_children_follow_their_parents_by_start() -> None:
    """As a waterfall shows them."""
    trace = _trace(
        _span("c", "a", 50, 60),
        _span("d", "b", 12, 14),
        _span("b", "a", 10, 20),
        _span("a", None, 0, 100),
    )
    ids = [span.span_id for span in trace.spans]
    assert list(zip(ids, trace.depths, strict=True)) == [
        ("a", 0), ("b", 1), ("d", 2), ("c", 1),
    ]  # fmt: skip


def test_spans_whose_parent_is_missing_are_roots() -> None:
    """And the trace says how many parents are missing."""
    trace = _trace(_span("b", "x", 5, 20), _span("c", "x", 1, 2), _span("d", "b", 6, 7))
    assert [span.span_id for span in trace.spans] == ["c", "b", "d"]
    assert trace.missing == 1


def test_the_root_comes_first() -> None:
    """Also if a span whose parent is missing has an earlier clock."""
    trace = _trace(_span("b", "x", 1, 2), _span("a", None, 5, 20), _span("c", "a", 6, 7))
    assert [span.span_id for span in trace.spans] == ["a", "c", "b"]


def test_spans_that_are_each_others_parents_are_shown() -> None:
    """A broken sender must not hide them, or hang the reader."""
    trace = _trace(_span("a", "b", 0, 5), _span("b", "a", 1, 4), _span("s", "s", 2, 3))
    assert sorted(span.span_id for span in trace.spans) == ["a", "b", "s"]


def test_the_critical_path_is_what_the_root_waits_for() -> None:
    """From its end backwards: the child that ended last, then what ended before that began."""
    trace = _trace(
        _span("root", None, 0, 100),
        _span("first", "root", 10, 40),
        _span("beside", "root", 15, 35),
        _span("last", "root", 50, 90),
        _span("inner", "last", 60, 70),
    )
    assert _critical(trace) == {
        "root": [(0, 10), (40, 50), (90, 100)],
        "first": [(10, 40)],
        "last": [(50, 60), (70, 90)],
        "inner": [(60, 70)],
    }


def test_what_runs_on_after_its_parent_is_not_waited_for() -> None:
    """A message that was sent, for example."""
    trace = _trace(_span("root", None, 0, 10), _span("message", "root", 5, 500))
    assert _critical(trace) == {"root": [(0, 10)]}
    assert trace.duration_us == 500


@pytest.mark.parametrize("start", [5, 15, 30, -2000, 70_000], ids=str)
def test_a_call_whose_server_has_another_clock_is_waited_for(start: int) -> None:
    """It was in the middle of the client's time; so were the spans of its service in it.

    Parts are by the clock of their span, which the waterfall shows.
    """
    trace = _trace(
        _span("root", None, 0, 100),
        _span("client", "root", 10, 60, kind="CLIENT"),
        _span("server", "client", start, start + 40, service="cart"),
        _span("inner", "server", start + 5, start + 15, service="cart", kind="INTERNAL"),
    )
    parts = _critical(trace)
    assert parts["root"] == [(0, 10), (60, 100)]
    assert parts["inner"] == [(start + 5, start + 15)]
    assert parts["server"] == [(start, start + 5), (start + 15, start + 40)]
    own = parts["client"]
    assert (own[0][0], own[-1][1]) == (10, 60)
    assert sum(end - begun for begun, end in own) == 10


@pytest.mark.parametrize("start", [0, 20, 5000], ids=str)
def test_a_client_that_gave_up_waited_for_its_server(start: int) -> None:
    """As long as it did, though the server went on."""
    trace = _trace(
        _span("client", None, 10, 60, kind="CLIENT"),
        _span("server", "client", start, start + 500, service="cart"),
    )
    parts = _critical(trace)
    (only,) = parts["server"]
    assert only[0] == start
    assert sum(end - begun for own in parts.values() for begun, end in own) == 50
    assert only[1] - only[0] >= 40


def test_a_child_that_begins_before_its_parent_counts_from_there() -> None:
    """By the same clock: the rest of it is not waited for; one that is over by then not at all."""
    trace = _trace(
        _span("root", None, 0, 100),
        _span("early", "root", -5, 50),
        _span("over", "root", -20, -10),
    )
    assert _critical(trace) == {"root": [(50, 100)], "early": [(0, 50)]}


@pytest.mark.parametrize("seed", range(20))
def test_no_clocks_make_the_critical_path_longer_than_the_root(seed: int) -> None:
    """Parts lie in their spans, and add up to the duration of the root."""
    rng = random.Random(seed)
    clocks = {service: rng.choice([0, -3, 7, -400, 10_000]) for service in "abcd"}
    spans = [_span("0", None, clocks["a"], clocks["a"] + 1000, service="a")]
    for number in range(1, 60):
        parent = rng.choice(spans)
        service = rng.choice("abcd")
        start = parent.start_us + clocks[service] - clocks[parent.service] + rng.randrange(300)
        kind = rng.choice(["SERVER", "CLIENT", "INTERNAL", "CONSUMER"])
        end = start + rng.randrange(400)
        spans.append(_span(str(number), parent.span_id, start, end, service=service, kind=kind))
    root = max((span for span in spans if span.parent_span_id is None), key=_duration)
    trace = _trace(*spans)
    for span, parts in zip(trace.spans, trace.critical, strict=True):
        for start, end in parts:
            assert span.start_us <= start < end <= span.end_us
        assert list(parts) == sorted(parts)
    total = sum(end - start for parts in trace.critical for start, end in parts)
    assert total == root.duration_us


def _duration(span: TraceSpan) -> int:
    return span.duration_us


def test_the_parts_of_the_critical_path_add_up() -> None:
    """To the duration of the root, however spans overlap."""
    spans = [_span("r", None, 0, 1000)]
    for number in range(40):
        parent = "r" if number < 5 else str(number // 3)
        start = number * 37 % 900
        spans.append(_span(str(number), parent, start, min(1000, start + 13 * (number % 7 + 1))))
    parts = [part for own in _critical(_trace(*spans)).values() for part in own]
    assert sum(end - start for start, end in parts) == 1000


def test_ten_thousand_spans_are_no_problem() -> None:
    """Neither beside each other nor one in the other."""
    flat = [_span(str(n), "r", n, n + 5) for n in range(10_000)]
    assert len(_trace(_span("r", None, 0, 20_000), *flat).spans) == 10_001
    deep = [_span(str(n), str(n - 1) if n else None, n, 30_000 - n) for n in range(10_000)]
    assert _trace(*deep).depths[-1] == 9_999
