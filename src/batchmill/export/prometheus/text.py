"""Series as text: the exposition format of Prometheus, and OpenMetrics for whoever asks for it."""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Iterable, Iterator

from batchmill.export.prometheus.series import Family, Labels

_MEDIA = re.compile(r"\s*([^;,\s]+)([^,]*)")
_Q = re.compile(r";\s*q=([0-9.]+)", re.IGNORECASE)


class TextFormat(enum.Enum):
    """How a page is written; the value is its content type."""

    PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
    OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"

    @classmethod
    def accepted(cls, accept: str) -> TextFormat:
        """The one that the header ``Accept`` likes better; of equals the plain one.

        >>> TextFormat.accepted("application/openmetrics-text;version=1.0.0,*/*;q=0.1").name
        'OPENMETRICS'
        """
        likes = {"application/openmetrics-text": 0.0, "text/plain": 0.0, "*/*": 0.0}
        for media, more in _MEDIA.findall(accept):
            quality = _Q.search(more)
            if media.lower() in likes:
                likes[media.lower()] = _number(quality[1]) if quality else 1.0
        plain = max(likes["text/plain"], likes["*/*"])
        return cls.OPENMETRICS if likes["application/openmetrics-text"] > plain else cls.PROMETHEUS


def render(families: Iterable[Family], form: TextFormat = TextFormat.PROMETHEUS) -> str:
    """A whole page, family by family in the order given; one without series is left out."""
    is_open = form is TextFormat.OPENMETRICS
    lines = [line for each in families if each.series for line in _lines(each, is_open)]
    if is_open:
        lines.append("# EOF")
    return "".join(f"{line}\n" for line in lines)


def _lines(family: Family, is_open: bool) -> Iterator[str]:
    # OpenMetrics names the family of a counter without what its series end in.
    cut = is_open and family.kind == "counter"
    head = family.name.removesuffix("_total") if cut else family.name
    text = _escaped(family.help) if is_open else _escaped_help(family.help)
    yield f"# HELP {head} {text}"
    yield f"# TYPE {head} {family.kind}"
    for each in family.series:
        labels = _labels(each.labels)
        yield (
            f"{family.name}{{{labels}}} {number(each.value)}"
            if labels
            else (f"{family.name} {number(each.value)}")
        )


def number(value: float) -> str:
    """A value as both formats write it.

    >>> number(12), number(0.1), number(math.inf), number(-math.inf), number(math.nan)
    ('12', '0.1', '+Inf', '-Inf', 'NaN')
    """
    if isinstance(value, int) or math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


def _labels(labels: Labels) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _escaped_help(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
