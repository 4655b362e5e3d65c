"""The registry: all queues, batchers, thresholds and flows of a process, and their totals.

Guarantees
    * A component is referred to weakly: the registry keeps nothing alive.
    * Counters never fall. A total is the sum of what was added to each component of one name since
      the process started, so it goes on where a component is closed and made again by that name.
    * Components are read with no lock of the registry held: whoever makes, closes or uses a
      component waits for no collector. A component that fails is counted; the others are read.
    * Labels are bounded: the first ``max_names`` names of a kind have series of their own, all
      later ones share the name ``_other``.
    * In a forked child all totals start at 0, as the components do.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from batchmill import lifecycle
from batchmill.telemetry.instruments import (
    ComponentKind,
    Instrument,
    InstrumentKind,
    Labels,
    Value,
    added,
    counter,
    highest,
    increase,
    up_down,
)

log = logging.getLogger("batchmill.telemetry")

OTHER = "_other"
"""The name shared by all components beyond the limit of names."""
MAX_NAMES = 1_000
_LOG_EVERY_S = 60.0

S = TypeVar("S")


class Component(Protocol[S]):
    """Something whose stats can be collected; see :func:`register`."""

    @property
    def kind(self) -> ComponentKind[S]:
        """Its instruments; the same object for all components of a kind."""
        ...

    @property
    def name(self) -> str:
        """Its name, a label; components of one kind and name are added up."""
        ...

    def stats(self) -> S:
        """A snapshot. Called by any thread; it must not wait for anything."""
        ...


class Registration:
    """The registry's record of one component; :meth:`close` it with the component."""

    __slots__ = ("_counted", "_registry", "closed", "kind", "name", "reference", "unnamed")

    def __init__(self, registry: Registry, component: Component[Any]) -> None:
        self._registry = registry
        self.kind: ComponentKind[Any] = component.kind
        self.name = component.name
        self.reference = weakref.ref(component, registry._dead.append)
        self.closed = False
        self.unnamed = False
        self._counted: dict[tuple[Instrument[Any], Labels], Value] = {}

    def close(self, component: Component[Any]) -> None:
        """The component is closed: count it a last time and show its depth no more.

        As long as the object lives its counters are still read: it may go on refusing items.
        """
        self.closed = True
        self._registry._read(self, component)

    def reset(self) -> None:
        """In a forked child: nothing was counted yet."""
        self._counted = {}
        self.unnamed = False

    def increase(self, instrument: Instrument[Any], labels: Labels, now: Value) -> Value:
        """What was added to a counter since the last call."""
        before = self._counted.get((instrument, labels))
        delta = increase(before, now)
        self._counted[instrument, labels] = added(before, delta)
        return delta


@dataclass(frozen=True, slots=True)
class Family(Generic[S]):
    """The values of one instrument, of all components of a kind."""

    kind: ComponentKind[S]
    instrument: Instrument[S]
    values: Mapping[Labels, Value]
    """By the values of the labels; the component's name is the first, if the kind has a label."""


@dataclass(frozen=True, slots=True)
class RegistryStats:
    """What a registry knows about itself."""

    components: Mapping[str, int]
    """Open components, by kind."""
    failures: Mapping[str, int]
    """Components that raised when they were read, by kind."""
    unnamed: Mapping[str, int]
    """Names beyond the limit, by kind; their components are added up as ``_other``."""


TELEMETRY: ComponentKind[RegistryStats] = ComponentKind(
    "telemetry",
    (
        up_down("components", "{component}", "Open components.", lambda s: s.components, "kind"),
        counter(
            "failures",
            "{failure}",
            "Components that could not be read, and are missing on that page.",
            lambda s: s.failures,
            "kind",
        ),
        counter(
            "unnamed_components",
            "{component}",
            "Components past the limit of names; they are added up under the name _other.",
            lambda s: s.unnamed,
            "kind",
        ),
    ),
)

_Series = dict[Instrument[Any], dict[Labels, Value]]


class Registry(lifecycle.Tracked):
    """Knows the components of a process and collects their stats; any thread may use it."""

    kind = TELEMETRY
    name = ""
    fork_order = -1  # before the components, which may close in a forked child

    def __init__(self, max_names: int = MAX_NAMES) -> None:
        self._max_names = max_names
        # Reentrant: garbage may be collected at any point, and a finaliser may make a component.
        self._lock = threading.RLock()
        self._registrations: dict[int, Registration] = {}
        """By the id of the weak reference."""
        self._dead: deque[weakref.ref[Any]] = deque()
        """Of components that were collected; in the middle of anything, so it takes no lock."""
        self._kinds: dict[ComponentKind[Any], None] = {}
        self._reset()
        self._own = self.register(self)
        lifecycle.track(self)

    def _reset(self) -> None:
        self._totals: _Series = {}
        self._names: dict[ComponentKind[Any], dict[str, None]] = {}
        self._failures: Counter[str] = Counter()
        self._unnamed: Counter[str] = Counter()
        self._logged_s = -_LOG_EVERY_S

    def register(self, component: Component[Any]) -> Registration:
        """Collect a component from now on; weakly, so it need not be closed to be forgotten."""
        registration = Registration(self, component)
        with self._lock:
            self._bury()
            self._registrations[id(registration.reference)] = registration
            self._kinds[registration.kind] = None
        return registration

    def components(self, kind: ComponentKind[S]) -> list[Component[S]]:
        """The open components of a kind, by name."""
        components = [
            component
            for registration in self._open()
            if registration.kind is kind and (component := registration.reference()) is not None
        ]
        return sorted(components, key=lambda component: component.name)

    def collect(self) -> list[Family[Any]]:
        """The values of all instruments that have any, by kind, in the order of their kinds."""
        with self._lock:
            self._bury()
            registrations = list(self._registrations.values())
        now: _Series = {}
        for registration in registrations:
            component = registration.reference()
            if component is not None and registration is not self._own:
                self._read(registration, component, now)
        self._read(self._own, self, now)  # the last, so that it counts the failures of this time
        with self._lock:
            return [
                Family(kind, instrument, values)
                for kind in self._kinds
                for instrument in kind.instruments
                if (values := dict(self._totals.get(instrument, ()) or now.get(instrument, ())))
            ]

    def stats(self) -> RegistryStats:
        """How many components there are, and what could not be read."""
        components = Counter(
            registration.kind.name
            for registration in self._open()
            if registration.kind is not TELEMETRY
        )
        with self._lock:
            # Also the zeros: Prometheus sees no increase in a counter that begins with 1.
            kinds = [kind.name for kind in self._kinds if kind is not TELEMETRY]
            return RegistryStats(
                components={name: components[name] for name in kinds},
                failures={name: self._failures[name] for name in kinds},
                unnamed={name: self._unnamed[name] for name in kinds},
            )

    def _open(self) -> list[Registration]:
        with self._lock:
            self._bury()
            return [one for one in self._registrations.values() if not one.closed]

    def _bury(self) -> None:
        while self._dead:
            self._registrations.pop(id(self._dead.popleft()), None)

    def _read(
        self, registration: Registration, component: Component[Any], now: _Series | None = None
    ) -> None:
        """Add what a component counted to the totals, and what it holds to ``now``."""
        try:
            stats = component.stats()
            readings = [
                (instrument, labels, value)
                for instrument in registration.kind.instruments
                for labels, value in instrument.values(stats).items()
            ]
        except Exception:  # noqa: BLE001 - user code, perhaps; counted, the others are read
            self._failed(registration)
            return
        with self._lock:
            name = self._name(registration)
            for instrument, labels, value in readings:
                key = labels if registration.kind.label is None else (name, *labels)
                if instrument.kind in (InstrumentKind.COUNTER, InstrumentKind.HISTOGRAM):
                    series = self._totals.setdefault(instrument, {})
                    delta = registration.increase(instrument, labels, value)
                    series[key] = added(series.get(key), delta)
                elif now is not None and not registration.closed:
                    series = now.setdefault(instrument, {})
                    combine = added if instrument.kind is InstrumentKind.UP_DOWN else highest
                    series[key] = combine(series.get(key), value)

    def _name(self, registration: Registration) -> str:
        """The name that a component has on pages: its own, or one for all beyond the limit."""
        names = self._names.setdefault(registration.kind, {})
        if registration.name in names:
            return registration.name
        if len(names) < self._max_names:
            names[registration.name] = None
            return registration.name
        if not registration.unnamed:
            registration.unnamed = True
            self._unnamed[registration.kind.name] += 1
        return OTHER

    def _failed(self, registration: Registration) -> None:
        with self._lock:
            self._failures[registration.kind.name] += 1
            now_s = time.monotonic()
            if now_s - self._logged_s < _LOG_EVERY_S:
                return
            self._logged_s = now_s
        log.exception(
            "batchmill telemetry: %s %s cannot be read; it is missing, the others are there. "
            "Logged once a minute, counted in batchmill_telemetry_failures_total.",
            registration.kind.name,
            registration.name,
        )

    def after_fork_in_child(self) -> None:
        """Count from 0: the components do, and the parent's totals are the parent's."""
        self._lock = threading.RLock()
        self._reset()
        for registration in self._registrations.values():
            registration.reset()


default_registry = Registry()
"""The registry of this process, in which queues, batchers, thresholds and flows register."""


def register(component: Component[Any]) -> Registration:
    """Have a component collected with all others of this process; close the registration with it.

    >>> class Pool:
    ...     kind = ComponentKind(
    ...         "pool", (up_down("size", "{thread}", "Threads.", lambda size: size),), "pool"
    ...     )
    ...     name = "images"
    ...
    ...     def stats(self) -> int:
    ...         return 4
    >>> pool = Pool()
    >>> registration = register(pool)
    >>> [dict(family.values) for family in default_registry.collect() if family.kind is pool.kind]
    [{('images',): 4}]
    >>> registration.close(pool)
    """
    return default_registry.register(component)
