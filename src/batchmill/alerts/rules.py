"""Alert rules: what is watched, of which entities, and what is said when it fires."""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from batchmill.alerts.expression import (
    Binary,
    Constant,
    Node,
    OverTime,
    Within,
    label_faults,
    metric_names,
)
from batchmill.extras import require_extra
from batchmill.wording import count_of

MOST_MINUTES = 1440
"""The longest period of a rule."""
RESERVED_LABELS = ("alertname", "entity", "entity_id", "entity_name", "severity", "window")
"""Labels that every alert has, or may have; a rule cannot set them."""
DEFAULT_MESSAGE = "{name}: {condition}; the value is {value}"


class NoData(enum.Enum):
    """What a minute without a value means for a rule."""

    OK = "ok"
    """The minute does not match."""
    FIRING = "firing"
    """The minute matches: something that is silent is broken."""
    KEEP = "keep"
    """Nothing changes until there is a value again."""


@dataclass(frozen=True, kw_only=True)
class Scope:
    """The entities that a rule applies to, by name; a name or a regular expression may leave out.

    An entity has several names: ``GET /``, ``GET / in shop``, and its id. A regular expression
    (RE2) must match one of them completely.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    include_regex: str = ""
    exclude_regex: str = ""

    def applies(self, names: tuple[str, ...]) -> bool:
        """Whether the rule applies to the entity of these names."""
        if any(name in self.exclude for name in names) or _matches(self.exclude_regex, names):
            return False
        if not self.include and not self.include_regex:
            return True
        listed = not self.include or any(name in self.include for name in names)
        return listed and (not self.include_regex or _matches(self.include_regex, names))


def _matches(pattern: str, names: tuple[str, ...]) -> bool:
    return bool(pattern) and any(compile_regex(pattern).fullmatch(name) for name in names)


@functools.lru_cache(maxsize=1000)
def compile_regex(pattern: str) -> Any:
    """A regular expression of RE2; raises ValueError if it is none."""
    require_extra("a rule with a regular expression", "alerts", "re2")
    import re2

    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        text = error.args[0] if error.args else ""
        raise ValueError(text.decode() if isinstance(text, bytes) else str(text)) from None


@dataclass(frozen=True, kw_only=True)
class Threshold:
    """A condition on the values of the last ``period`` minutes."""

    condition: Node
    """One number, 1 or 0, by label; the rule fires if it is 1 for any of them."""
    period: int
    text: str
    """In words."""

    @property
    def metrics(self) -> list[str]:
        """The metrics that it reads."""
        return metric_names(self.condition)

    def label_faults(self, metrics: Mapping[str, tuple[str, Sequence[int | None]]]) -> list[str]:
        """What is wrong with the labels that it selects.

        ``metrics``: by name the function, with its arguments that are numbers.
        """
        return label_faults(self.condition, metrics)

    @property
    def subject(self) -> Node:
        """The node whose newest value is shown with the alert."""
        return _subject(self.condition)

    @property
    def counted(self) -> OverTime | None:
        """Where the condition is "so many minutes": the node that counts them."""
        root = self.condition
        if (
            isinstance(root, Binary)
            and root.sign in (">", ">=")
            and isinstance(root.left, OverTime)
        ):
            return (
                root.left if root.left.function == "sum" and _is_condition(root.left.of) else None
            )
        return None


@dataclass(frozen=True, kw_only=True)
class BurnRate:
    """An error budget that is used up too fast, in a long window and in a short one.

    The burn rate is the share of bad calls, divided by the share that the objective allows: at 1
    the budget lasts exactly as long as the period that the objective is for.
    """

    metric: str
    """A metric of the function ``percent()``: the share of good calls."""
    objective: float
    """Between 0 and 1, such as 0.999."""
    long_minutes: int
    short_minutes: int
    factor: float

    @property
    def metrics(self) -> list[str]:
        """The metrics that it reads."""
        return [self.metric]

    @property
    def period(self) -> int:
        """The minutes that it looks at."""
        return self.long_minutes

    @property
    def text(self) -> str:
        """In words."""
        long, short = duration_text(self.long_minutes), duration_text(self.short_minutes)
        return (
            f"the error budget of {self.metric} ({self.objective * 100:g} %) burns at more than "
            f"{self.factor:g} times the allowed rate over {long} and {short}"
        )


Condition: TypeAlias = Threshold | BurnRate


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One alert rule."""

    name: str
    """The label ``alertname`` of its alerts."""
    condition: Condition
    window: str = ""
    """Of a rule with several burn rates: the long window of this one, such as ``1h``."""
    scope: Scope = Scope()
    severity: str = "warning"
    labels: Mapping[str, str] = field(default_factory=dict)
    message: str = DEFAULT_MESSAGE
    no_data: NoData = NoData.OK
    silence: int = 0
    """Minutes after a notification in which the same alert sends no other one."""
    repeat: int = 0
    """A notification is repeated after so many minutes while the alert fires; 0: never."""
    recovery: int = 0
    """So many further minutes must be good before the alert is resolved."""

    @property
    def id(self) -> str:
        """What its state is kept under."""
        return f"{self.name}/{self.window}" if self.window else self.name

    def message_for(self, name: str, value: str) -> str:
        """The message of an alert; braces with another word stay as they are."""
        words = {"name": name, "value": value, "condition": self.condition.text, "rule": self.name}
        text = self.message
        for word, filled in words.items():
            text = text.replace(f"{{{word}}}", filled)
        return text

    def alert_labels(self, entity_name: str, entity_id: str) -> dict[str, str]:
        """The labels of an alert: they are its identity for whoever is notified.

        ``entity`` is the same as ``entity_name``: receivers may route on either.
        """
        own = {"alertname": self.name, "severity": self.severity}
        if self.window:
            own["window"] = self.window
        entity = {"entity": entity_name, "entity_id": entity_id, "entity_name": entity_name}
        return {**self.labels, **own, **entity}

    def as_json(self) -> dict[str, Any]:
        """For the page and for ``batchmill alerts list``."""
        return {
            "name": self.name,
            "window": self.window,
            "condition": self.condition.text,
            "metrics": self.condition.metrics,
            "period": self.condition.period,
            "severity": self.severity,
            "labels": dict(self.labels),
            "no_data": self.no_data.value,
            "silence": self.silence,
            "repeat": self.repeat,
            "recovery": self.recovery,
        }


def count_condition(values: Node, sign: str, threshold: float, count: int) -> Node:
    """The condition that ``values`` compare so in at least ``count`` minutes."""
    matches = Binary(sign, values, Constant(threshold))
    return Binary(">=", OverTime("sum", matches), Constant(float(count)))


def count_text(count: int, period: int) -> str:
    """How many minutes must match, in words.

    >>> count_text(3, 10), count_text(1, 1)
    ('in 3 of 10 minutes', 'in 1 minute')
    """
    if count == period:
        return f"in {count_of(count, 'minute')}"
    return f"in {count} of {count_of(period, 'minute')}"


def duration_text(minutes: int) -> str:
    """A duration in its largest unit that fits.

    >>> duration_text(5), duration_text(60), duration_text(4320)
    ('5m', '1h', '3d')
    """
    if minutes % 1440 == 0:
        return f"{minutes // 1440}d"
    return f"{minutes // 60}h" if minutes % 60 == 0 else f"{minutes}m"


def _is_condition(node: Node) -> bool:
    return isinstance(node, Binary) and node.is_condition


def _subject(node: Node) -> Node:
    """The left side of the first comparison, within all counts of minutes."""
    while True:
        if isinstance(node, Binary) and node.is_condition:
            node = node.left
        elif (isinstance(node, OverTime) and _is_condition(node.of)) or isinstance(node, Within):
            node = node.of
        else:
            return node
