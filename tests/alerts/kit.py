"""What the tests of alerts share: a shop whose minutes are written one by one, and its engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from batchmill.alerts import AlertEngine, AlertSettings, Receiver, Rule, load_rules
from batchmill.sources import Grain
from batchmill.store import ClockReading, Store
from tests.web.kit import START_S, Call, CallWriter, bucket_of

QUICK: dict[str, Any] = {
    "poll_s": 0.01,
    "grace_s": 15.0,
    "initial_ms": 5,
    "max_ms": 20,
    "close_timeout_s": 5.0,
}
ERRORS = """
[[rule]]
name = "errors"
expression = "service_sla / 100"
comparison = "< 95"
message = "{name}: {value} %"
"""


class Shop:
    """A store to which calls are written minute by minute, from minute 0 on; and the time."""

    def __init__(self, store: Store, stream: str = "live") -> None:
        self.store = store
        self.now_s = float(START_S)
        self.writer = CallWriter(store, stream)
        self.steady_s: float | None = None
        """By a clock that nobody can set. If it is given, commits have this time and ``now_s``."""

    def clock(self) -> float:
        """The time."""
        return self.now_s

    def minute(self, number: int, **services: tuple[int, int]) -> None:
        """Write a minute: good and bad calls of each service, of 100 ms each."""
        at_s = START_S + 60 * number
        calls = [
            Call(service, at_s, ok=ok)
            for service, (good, bad) in services.items()
            for ok in [*[True] * good, *[False] * bad]
        ]
        reading = None if self.steady_s is None else ClockReading(self.now_s, self.steady_s)
        self.writer.write(calls, clock=reading)

    def over(self, number: int, seconds: float = 20.0) -> None:
        """Let it be so many seconds after a minute."""
        self.now_s = START_S + 60 * (number + 1) + seconds

    def engine(self, rules: Sequence[Rule], to: Sequence[str] = (), **settings: Any) -> AlertEngine:
        """An engine on the store; not started."""
        return AlertEngine(
            self.store,
            rules,
            [Receiver.parse(url) for url in to],
            AlertSettings(**(QUICK | settings)),
            clock=self.clock,
        )


def rules_of(folder: Path, text: str = ERRORS, name: str = "alerts.toml") -> Sequence[Rule]:
    """The rules of a text."""
    path = folder / name
    path.write_text(text)
    return load_rules(path).rules


def ends(number: int) -> int:
    """The end of a minute, in seconds since 1970."""
    return START_S + 60 * (number + 1)


def bucket(number: int) -> int:
    """The bucket of a minute."""
    return bucket_of(Grain.MINUTE, START_S + 60 * number)


def firing(engine: AlertEngine) -> list[tuple[str, str]]:
    """Rule and entity of the alerts that fire."""
    return sorted((alert.rule, alert.entity_name) for alert in engine.firing())
