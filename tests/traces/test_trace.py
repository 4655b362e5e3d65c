"""The spans of a trace as a tree, and what its duration consists of."""

from __future__ import annotations

from typing import Any

from batchmill.traces import Trace, TraceSpan


def _span(own: str, parent: str | None, start: int, end: int, **given: Any) -> TraceSpan:
    return TraceSpan("t", own, parent, start, end - start, "shop", own, "SERVER", "UNSET", **given)


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
