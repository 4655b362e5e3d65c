"""Expressions of alert rules: what they compute, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import pytest

from batchmill.alerts import ExpressionError
from batchmill.alerts.expression import Window, metric_names, parse

Values = Sequence[float | None]
PERCENTILES: Mapping[str, Values] = {"{p=50}": [10, 20, 30], "{p=99}": [100, 2000, 3000]}


def compute(
    text: str, absent: float | None = None, **metrics: Values | Mapping[str, Values]
) -> object:
    """The values of an expression over three minutes; without labels only the numbers."""
    labelled = {
        name: values if isinstance(values, Mapping) else {"": values}
        for name, values in metrics.items()
    }
    result = parse(text).compute(Window(labelled, 3, absent))
    numbers = {label: list(values) for label, values in result.items()}
    plain = {label: values[0] if len(values) == 1 else values for label, values in numbers.items()}
    return plain[""] if set(plain) == {""} else plain


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("x", [1, 2, None]),
        ("x * 2 + 1", [3, 5, None]),
        ("-x - -1", [0, -1, None]),
        ("10 - 2 - 3", 5),
        ("2 + 3 * 4", 14),
        ("7 % 4", 3),
        ("x / (x - 1)", [None, 2, None]),
        ("x > 1", [0, 1, None]),
        ("sum(x)", 3),
        ("avg(x)", 1.5),
        ("min(x)", 1),
        ("max(x)", 2),
        ("count(x)", 2),
        ("latest(x)", 2),
        ("sum(x >= 1) >= 2", 1),
        ("avg(x) > 1 && max(x) > 5", 0),
        ("avg(x) > 1 || max(x) > 5", 1),
        ("1 < 2 == 1", 1),
        ("abs(-x)", [1, 2, None]),
        ("ceil(x / 2)", [1, 1, None]),
        ("floor(x / 2)", [0, 1, None]),
        ("round(x / 3, 2)", [0.33, 0.67, None]),
    ],
)
def test_values(text: str, result: object) -> None:
    """Operators bind as in C; a missing value stays missing, and functions leave it out."""
    assert compute(text, x=[1, 2, None]) == result


def test_missing_metric_has_no_value() -> None:
    """A function of nothing is nothing, and so is its comparison."""
    assert compute("avg(y) > 1") is None


def test_missing_value_may_count_as_true() -> None:
    """Where the rule says so, a comparison with a missing value is true."""
    assert compute("sum(x > 5) >= 1", absent=1.0, x=[1, 2, None]) == 1


def test_labels_are_computed_each_for_itself() -> None:
    """A percentile has a value for each rank; each is compared."""
    assert compute("sum(p > 1000) >= 2", p=PERCENTILES) == {"{p=50}": 0, "{p=99}": 1}


@pytest.mark.parametrize(
    "selector", ["p='99'", 'p="99"', "p='95,99'", "p!='50,75,90,95'", "_='4'", "p='4'"]
)
def test_labels_are_selected(selector: str) -> None:
    """By value, by several, by those left out, or by their position, as older rules have it."""
    assert compute(f"max(p{{{selector}}})", p=PERCENTILES) == {"{p=99}": 3000}


def test_labels_are_combined() -> None:
    """aggregate_labels() makes one value of all labels."""
    assert compute("aggregate_labels(p, sum)", p=PERCENTILES) == [110, 2020, 3030]


def test_metrics_of_an_expression() -> None:
    """Each once, in order."""
    assert metric_names(parse("sum(b / a > b) >= 1")) == ["b", "a"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is missing at the end"),
        ("x >", "is missing at the end"),
        ("(x", "')' is missing at the end"),
        ("x)", "there is ')' behind the end"),
        ("x ? 1", "'?' is not allowed"),
        ("* x", "not '*'"),
        ("median(x)", "there is no function median()"),
        ("baseline(x, upper)", "baseline() is not supported"),
        ("sum(1)", "it needs a metric"),
        ("avg(x, 2)", "takes one argument"),
        ("aggregate_labels(x, top)", "avg or max or min or sum"),
        ("x{p=99}", "need quotes"),
        ("x{p>'99'}", "= or != is expected"),
        ("x{p='99', q='1'}", "one label"),
        ("(" * 60 + "x" + ")" * 60, "more than 50"),
    ],
)
def test_wrong_expressions(text: str, why: str) -> None:
    """Each is refused with the reason."""
    with pytest.raises(ExpressionError, match=re.escape(why)):
        parse(text)
