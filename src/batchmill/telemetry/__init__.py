"""Telemetry of the library: one registry of all components of a process, for any monitoring.

Queues, batchers, thresholds and flows register themselves in ``default_registry``; a component of
your own needs a :class:`ComponentKind` with its instruments and a call of :func:`register`.
:class:`PrometheusCollector` (extra ``prometheus``) and :func:`observe` (extra ``otel``) show all of
them. :mod:`batchmill.telemetry.exposition` writes pages for Prometheus; it needs prometheus-client,
so it is imported by its own name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchmill.extras import lazy_names
from batchmill.telemetry.instruments import (
    BATCH_SIZES,
    DURATIONS_S,
    LONGEST_BITS,
    NO_BATCHES,
    NO_DURATIONS,
    ComponentKind,
    Distribution,
    Instrument,
    InstrumentKind,
    counter,
    durations_by_bits,
    gauge,
    histogram,
    merged,
    prometheus_names,
    sizes_by_bits,
    up_down,
)
from batchmill.telemetry.registry import (
    Component,
    Family,
    Registration,
    Registry,
    RegistryStats,
    default_registry,
    register,
)
from batchmill.telemetry.snapshot import Snapshot

if TYPE_CHECKING:
    from batchmill.telemetry.otel import observe
    from batchmill.telemetry.prometheus import PrometheusCollector

__all__ = [
    "BATCH_SIZES",
    "Component",
    "ComponentKind",
    "DURATIONS_S",
    "Distribution",
    "Family",
    "Instrument",
    "InstrumentKind",
    "LONGEST_BITS",
    "NO_BATCHES",
    "NO_DURATIONS",
    "PrometheusCollector",
    "Registration",
    "Registry",
    "RegistryStats",
    "Snapshot",
    "counter",
    "default_registry",
    "durations_by_bits",
    "gauge",
    "histogram",
    "merged",
    "observe",
    "prometheus_names",
    "register",
    "sizes_by_bits",
    "up_down",
]

_PROMETHEUS = lazy_names(
    __name__,
    {"prometheus": "PrometheusCollector"},
    feature="telemetry for Prometheus",
    extra="prometheus",
)
_OTEL = lazy_names(
    __name__, {"otel": "observe"}, feature="telemetry for OpenTelemetry", extra="otel"
)


def __getattr__(name: str) -> Any:
    return (_OTEL if name == "observe" else _PROMETHEUS)(name)
