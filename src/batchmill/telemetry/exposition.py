"""Pages that Prometheus scrapes, as text. Needs prometheus-client, so the package does not load it.

What is on a page is a list of prometheus_client's metric families; see :func:`render`.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import prometheus_client
from prometheus_client import Metric
from prometheus_client.core import Exemplar, Sample
from prometheus_client.openmetrics import exposition as openmetrics

from batchmill.telemetry.prometheus import PrometheusCollector

_EOF = b"# EOF\n"
_MEDIA_RANGE = re.compile(r"\s*([^;,\s]+)([^,]*)")
_QUALITY = re.compile(r";\s*q=([0-9.]+)", re.IGNORECASE)


class TextFormat(enum.Enum):
    """How a page is written; the value is its content type."""

    PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
    OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"

    @classmethod
    def accepted(cls, accept: str) -> TextFormat:
        """The format that the header ``Accept`` prefers; of equals the plain one.

        >>> TextFormat.accepted("application/openmetrics-text;version=1.0.0,*/*;q=0.1").name
        'OPENMETRICS'
        """
        qualities = {"application/openmetrics-text": 0.0, "text/plain": 0.0, "*/*": 0.0}
        for media_type, parameters in _MEDIA_RANGE.findall(accept):
            if media_type.lower() in qualities:
                qualities[media_type.lower()] = _quality(parameters)
        plain = max(qualities["text/plain"], qualities["*/*"])
        preferred = qualities["application/openmetrics-text"] > plain
        return cls.OPENMETRICS if preferred else cls.PROMETHEUS


def render(metrics: Sequence[Metric], text_format: TextFormat = TextFormat.PROMETHEUS) -> bytes:
    """Write a page with these metrics, in the order given.

    Whole numbers are exact, however large: prometheus_client writes them as floats, which they are
    to Prometheus itself, but not to every reader.
    """
    try:
        page = _generate(metrics, text_format)
    except UnicodeEncodeError:  # half of a surrogate pair
        metrics = [_encodable(metric) for metric in metrics]
        page = _generate(metrics, text_format)
    if not any(_is_inexact(sample.value) for metric in metrics for sample in metric.samples):
        return page
    lines = page.split(b"\n")
    position = 0
    for metric in metrics:
        position += 2  # HELP and TYPE; then each sample has one line
        for sample in metric.samples:
            if _is_inexact(sample.value):
                lines[position] = lines[position].rpartition(b" ")[0] + b" %d" % sample.value
            position += 1
    return b"\n".join(lines)


def render_telemetry(text_format: TextFormat = TextFormat.PROMETHEUS) -> bytes:
    """Write a page with the components of this process: queues, batchers, thresholds, flows."""
    return render(list(PrometheusCollector().collect()), text_format)


Samples: TypeAlias = Sequence[Any]
"""Metric families as plain data: name, help, type and samples of each."""


def telemetry_samples() -> Samples:
    """The components of this process as plain data, for a page that another process writes."""
    return [
        [
            *(metric.name, metric.documentation, metric.type),
            [[sample.name, dict(sample.labels), sample.value] for sample in metric.samples],
        ]
        for metric in PrometheusCollector().collect()
    ]


def render_telemetry_of(label: str, processes: Mapping[str, Samples]) -> bytes:
    """Write a page with the components of several processes, by the value of ``label``."""
    metrics: dict[str, Metric] = {}
    for process, families in processes.items():
        for name, text, kind, samples in families:
            metric = metrics.setdefault(name, Metric(name, text, kind))
            for sample_name, labels, value in samples:
                metric.add_sample(sample_name, {**labels, label: process}, value)
    return render(list(metrics.values()))


def open_ended(page: bytes) -> bytes:
    """A page without OpenMetrics' mark of the end: another page of its format may follow."""
    return page.removesuffix(_EOF)


@dataclass(frozen=True)
class _Collector:
    """The part of a registry that prometheus_client needs to write a page."""

    metrics: Sequence[Metric]

    def collect(self) -> Sequence[Metric]:
        return self.metrics


def _generate(metrics: Sequence[Metric], text_format: TextFormat) -> bytes:
    if text_format is TextFormat.OPENMETRICS:
        page: bytes = openmetrics.generate_latest(_Collector(metrics))  # type: ignore[no-untyped-call]
        return page
    return prometheus_client.generate_latest(_Collector(metrics))


def _encodable(metric: Metric) -> Metric:
    copy = Metric(metric.name, _replaced(metric.documentation), metric.type)
    for sample in metric.samples:
        labels = {name: _replaced(value) for name, value in sample.labels.items()}
        copy.add_sample(sample.name, labels, sample.value, exemplar=_encodable_exemplar(sample))
    return copy


def _encodable_exemplar(sample: Sample) -> Exemplar | None:
    if sample.exemplar is None:
        return None
    labels = {name: _replaced(value) for name, value in sample.exemplar.labels.items()}
    return sample.exemplar._replace(labels=labels)


def _replaced(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def _is_inexact(value: float) -> bool:
    return isinstance(value, int) and float(value) != value


def _quality(parameters: str) -> float:
    match = _QUALITY.search(parameters)
    try:
        return float(match[1]) if match else 1.0
    except ValueError:
        return 0.0
