"""A plan of the simulated shop: requests made of steps, each of which becomes a span.

Plain data, without OpenTelemetry, a clock or a network.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

Value = str | int

INSTANCES: Mapping[str, tuple[str, ...]] = {
    "gateway": ("gateway-1",),
    "web": ("web-1", "web-2"),
    "catalogue": ("catalogue-1", "catalogue-2"),
    "cart": ("cart-1",),
    "checkout": ("checkout-1",),
    "payment": ("payment-1",),
    "shipping": ("shipping-1",),
    "mail": ("mail-1",),
}
"""The services of the shop, and the processes of each."""

MOST = 5.0
"""No piece of work takes more than this many times its usual duration."""


@dataclass(frozen=True, slots=True)
class Step:
    """One span, with its children."""

    service: str
    instance: str
    kind: str
    """SERVER, CLIENT, PRODUCER, CONSUMER or INTERNAL."""
    name: str
    start_us: int
    """Since the start of the request."""
    duration_us: int
    attributes: tuple[tuple[str, Value], ...]
    error: str
    """Why it failed; empty: it did not."""
    children: tuple[Step, ...]

    @property
    def end_us(self) -> int:
        """Since the start of the request."""
        return self.start_us + self.duration_us

    def family(self) -> Iterator[tuple[Step, Step | None]]:
        """This step and all below it, each with its parent; parents come first."""
        line: list[tuple[Step, Step | None]] = [(self, None)]
        while line:
            step, parent = line.pop()
            yield step, parent
            line += [(child, step) for child in reversed(step.children)]


@dataclass(frozen=True, slots=True)
class Request:
    """A visitor's request with all that followed from it: one trace."""

    index: int
    offset_us: int
    """Since the start of the run."""
    root: Step

    @property
    def last_us(self) -> int:
        """When its last step ends, since the start of the request."""
        return max(step.end_us for step, _ in self.root.family())


class Draft:
    """A step while it is planned; the work in it moves its clock on."""

    def __init__(
        self,
        chance: random.Random,
        service: str,
        kind: str,
        name: str,
        *,
        instance: str = "",
        start_us: int = 0,
        incident: bool = False,
    ) -> None:
        """``incident``: the shop has trouble with one of its databases now."""
        self.chance = chance
        self.incident = incident
        self.service = service
        self.instance = instance or chance.choice(INSTANCES[service])
        self.kind = kind
        self.name = name
        self.attributes: dict[str, Value] = {}
        self.now_us = start_us
        self.error = ""
        self._start_us = start_us
        self._children: list[Draft] = []

    def work(self, usual_ms: float) -> None:
        """Work for about so long."""
        factor = min(self.chance.lognormvariate(0.0, 0.4), MOST)
        self.now_us += math.ceil(usual_ms * factor * 1000)

    def work_between(self, least_ms: float, most_ms: float) -> None:
        """Work for a time between the two."""
        self.now_us += round(self.chance.uniform(least_ms, most_ms) * 1000)

    def child(self, kind: str, name: str, service: str = "") -> Draft:
        """A step that begins now: of the same process, or of another service."""
        other = bool(service) and service != self.service
        made = Draft(
            self.chance,
            service if other else self.service,
            kind,
            name,
            instance="" if other else self.instance,
            start_us=self.now_us,
            incident=self.incident,
        )
        self._children.append(made)
        return made

    def wait_for(self, child: Draft) -> None:
        """Continue when the child has ended."""
        self.now_us = max(self.now_us, child.now_us)

    def fail(self, kind: str, why: str) -> None:
        """Mark it as failed."""
        self.error = why
        self.attributes["error.type"] = kind

    def begin_later(self, usual_ms: float) -> None:
        """Move its begin: a message waits before it is consumed."""
        self.work(usual_ms)
        self._start_us = self.now_us

    def step(self) -> Step:
        """The finished step, with all below it."""
        return Step(
            service=self.service,
            instance=self.instance,
            kind=self.kind,
            name=self.name,
            start_us=self._start_us,
            duration_us=self.now_us - self._start_us,
            attributes=tuple(self.attributes.items()),
            error=self.error,
            children=tuple(child.step() for child in self._children),
        )
