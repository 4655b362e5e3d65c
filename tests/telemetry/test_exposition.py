"""Pages for Prometheus as text: read back by the official client's own parser."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from batchmill.telemetry.exposition import TextFormat, render
from tests.kit.servers.prometheus import parsed


def gauge(text: str, label: str, *values: float) -> GaugeMetricFamily:
    """A gauge ``m`` with a series for each value, numbered by a label."""
    family = GaugeMetricFamily("m", text, labels=["label", "number"])
    for number, value in enumerate(values):
        family.add_metric([label, str(number)], value)
    return family


@pytest.mark.parametrize("form", TextFormat)
@given(st.text(st.characters(codec="utf-8")), st.floats() | st.integers(-(2**63), 2**63))
def test_any_text_and_any_number_come_back(form: TextFormat, label: str, value: float) -> None:
    """Whatever a label holds, and whatever the number is, the official client reads it back."""
    page = render([gauge(label, label, value)], form).decode()
    ((series, back),) = parsed(page, form).items()
    assert series == ("m", frozenset({("label", label), ("number", "0")}))
    assert back == value or (math.isnan(back) and math.isnan(value))


@pytest.mark.parametrize("form", TextFormat)
@given(st.lists(st.integers(-(2**70), 2**70) | st.floats(), min_size=1), st.text())
def test_whole_numbers_are_exact(form: TextFormat, values: list[float], label: str) -> None:
    """Also where a float is not, and whatever else is on the page."""
    calls = CounterMetricFamily("calls", "Calls.", value=2**53 + 1)
    lines = render([gauge(label, label, *values), calls], form).split(b"\n")[2:]
    written = [line.rpartition(b" ")[2] for line in lines[: len(values)]]
    for value, text in zip(values, written, strict=True):
        if isinstance(value, int):
            assert (int(text) if text.lstrip(b"-").isdigit() else int(float(text))) == value
    assert b"calls_total 9007199254740993" in lines


@pytest.mark.parametrize("form", TextFormat)
def test_half_a_surrogate_pair_is_a_question_mark(form: TextFormat) -> None:
    """UTF-8 cannot hold it, and the rest of the page is wanted all the same."""
    page = render([gauge("help \ud800", "label \ud800", 1.5)], form).decode()
    assert "# HELP m help ?" in page
    assert parsed(page, form) == {("m", frozenset({("label", "label ?"), ("number", "0")})): 1.5}


@pytest.mark.parametrize(
    ("accept", "form"),
    [
        ("", TextFormat.PROMETHEUS),
        ("*/*", TextFormat.PROMETHEUS),
        ("application/openmetrics-text", TextFormat.OPENMETRICS),
        ("application/openmetrics-text;q=0.5,text/plain;q=0.6", TextFormat.PROMETHEUS),
        ("application/openmetrics-text;q=1.1.1,*/*;q=0.1", TextFormat.PROMETHEUS),
    ],
)
def test_the_preferred_format_is_chosen(accept: str, form: TextFormat) -> None:
    """By the header Accept; of equals the plain one."""
    assert TextFormat.accepted(accept) is form
