"""All components of a process as observable instruments of OpenTelemetry."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation, get_meter_provider

from batchmill.telemetry.instruments import (
    ComponentKind,
    Distribution,
    Instrument,
    InstrumentKind,
    Labels,
    Value,
    on_kind,
)
from batchmill.telemetry.registry import Registry, default_registry

_SCOPE = "batchmill"
_FRESH_S = 1.0
"""How long one reading of the registry serves the instruments of one export."""


def observe(
    meter_provider: MeterProvider | None = None, registry: Registry = default_registry
) -> None:
    """Show all components of a registry through OpenTelemetry; call it once a provider.

    Without ``meter_provider`` it is the global one. The instruments are observable: they cost
    nothing until a reader collects them. A histogram is two counters, ``….count`` and ``….sum``,
    because OpenTelemetry has no observable histogram.
    """
    meter = (meter_provider or get_meter_provider()).get_meter(_SCOPE)
    reading = _Reading(registry)

    def add(kind: ComponentKind[Any]) -> None:
        for instrument in kind.instruments:
            name = kind.otel_name(instrument)
            attributes = kind.attribute_names(instrument)
            unit, text = instrument.unit, instrument.help
            callback = _Callback(reading, instrument, attributes)
            match instrument.kind:
                case InstrumentKind.COUNTER:
                    meter.create_observable_counter(name, [callback], unit, text)
                case InstrumentKind.UP_DOWN:
                    meter.create_observable_up_down_counter(name, [callback], unit, text)
                case InstrumentKind.GAUGE:
                    meter.create_observable_gauge(name, [callback], unit, text)
                case InstrumentKind.HISTOGRAM:
                    count = _Callback(reading, instrument, attributes, lambda value: value.count)
                    total = _Callback(reading, instrument, attributes, lambda value: value.sum)
                    meter.create_observable_counter(f"{name}.count", [count], "{value}", text)
                    meter.create_observable_counter(f"{name}.sum", [total], unit, text)

    on_kind(add)


class _Reading:
    """Reads the registry once for all instruments of one export.

    OpenTelemetry calls the callback of each instrument by itself. One that is called again starts a
    new export, and so does time: a view may have dropped the instrument that would have.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._lock = threading.Lock()
        self._values: dict[Instrument[Any], Any] = {}
        self._served: set[object] = set()
        self._read_s = -_FRESH_S

    def values(self, instrument: Instrument[Any], reader: object) -> dict[Labels, Value]:
        """The values of an instrument; ``reader`` is the callback that asks for them."""
        with self._lock:
            if reader in self._served or time.monotonic() - self._read_s >= _FRESH_S:
                families = self._registry.collect()
                self._values = {family.instrument: family.values for family in families}
                self._served.clear()
                self._read_s = time.monotonic()
            self._served.add(reader)
            values: dict[Labels, Value] = self._values.get(instrument, {})
            return values


class _Callback:
    """The callback of one observable instrument."""

    def __init__(
        self,
        reading: _Reading,
        instrument: Instrument[Any],
        attributes: Labels,
        part: Callable[[Distribution], float] | None = None,
    ) -> None:
        self._reading = reading
        self._instrument = instrument
        self._attributes = attributes
        self._part = part

    def __call__(self, options: CallbackOptions) -> Iterable[Observation]:
        for key, value in self._reading.values(self._instrument, self).items():
            if isinstance(value, Distribution):
                if self._part is None:
                    continue
                value = self._part(value)
            yield Observation(value, dict(zip(self._attributes, key, strict=True)))
