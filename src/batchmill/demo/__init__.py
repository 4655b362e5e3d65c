"""The simulated shop of ``batchmill demo``: eight services that send real OpenTelemetry spans.

:func:`plan` makes the traffic, :class:`Shop` turns it into spans of the OpenTelemetry SDK, and
:class:`Sender` sends them and counts what the receiver acknowledged. Loads without the SDK, so that
it can say which extra is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchmill.demo.steps import INSTANCES, Request, Step
from batchmill.demo.traffic import LONGEST_S, Stop, TrafficReport, incidents, plan, play
from batchmill.extras import lazy_names

if TYPE_CHECKING:
    from batchmill.demo.sender import LastWords, Sender, SentSpans, Shop, make_exporter

__all__ = [
    "INSTANCES",
    "LONGEST_S",
    "LastWords",
    "TrafficReport",
    "Request",
    "Sender",
    "SentSpans",
    "Shop",
    "Step",
    "Stop",
    "incidents",
    "make_exporter",
    "plan",
    "play",
]

_MODULES = {"sender": "LastWords Sender SentSpans Shop make_exporter"}

__getattr__ = lazy_names(__name__, _MODULES, feature="the demo", extra="demo")
