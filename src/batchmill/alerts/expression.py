"""Expressions over the minutes of metrics: what an alert rule computes for one entity.

The language is a part of SkyWalking's MQE: metrics with labels, arithmetic, comparisons, ``&&`` and
``||``, and functions that make one number of many minutes. :func:`parse` makes a tree of a text,
:meth:`Node.compute` its values for one entity; neither knows a store or a clock.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from batchmill.errors import BatchmillError
from batchmill.oal import FUNCTIONS, RANKS

Number: TypeAlias = float | None
"""None: there is no value."""
Minutes: TypeAlias = Mapping[str, Sequence[Number]]
"""A number for each minute of a window, oldest first, by label; "" is the label of all others."""
Numbers: TypeAlias = Mapping[str, Number]
"""One number for the whole window, by label."""

MAX_DEPTH = 50
_POSITIONS = {str(at): f"{{p={rank}}}" for at, rank in enumerate(RANKS)}
"""Percentiles by their position, as older rules of SkyWalking have them."""
_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)|(?P<name>[A-Za-z_][A-Za-z0-9_]*)"
    r"|(?P<text>'[^']*'|\"[^\"]*\")|(?P<sign>&&|\|\||[<>=!]=|[-+*/%<>(){},=]))",
    re.ASCII,
)


class ExpressionError(BatchmillError, ValueError):
    """The expression of an alert rule is not valid."""

    text: str
    why: str
    template = "{why} in {text!r}"


@dataclass(frozen=True)
class Window:
    """What is known of one entity over the minutes of a rule's period."""

    metrics: Mapping[str, Minutes]
    """By metric; all sequences are as long as the period."""
    minutes: int
    absent: Number = None
    """What a comparison with a missing value gives: None, or 1 if that is to count as true."""
    names: tuple[str, ...] = ()
    """The names of the entity, for rules that are made of others with their own scopes."""

    def last(self, minutes: int) -> Window:
        """The same with the newest minutes only."""
        shorter = {
            name: {label: values[-minutes:] for label, values in labels.items()}
            for name, labels in self.metrics.items()
        }
        return Window(shorter, minutes, self.absent, self.names)


class Node:
    """A part of an expression. ``is_series``: it has a number for each minute, not just one."""

    is_series: bool = False

    def compute(self, window: Window) -> Minutes:
        """Its values; one that has a single number gives sequences of length 1."""
        raise NotImplementedError

    def parts(self) -> Iterable[Node]:
        """The nodes below it."""
        return ()

    def walk(self) -> Iterator[Node]:
        """The node itself and all below it."""
        yield self
        for part in self.parts():
            yield from part.walk()


@dataclass(frozen=True)
class Constant(Node):
    """A number in the text."""

    number: float

    def compute(self, window: Window) -> Minutes:
        return {"": [self.number]}


@dataclass(frozen=True)
class MetricValues(Node):
    """The values of a metric; with ``labels``, only of those labels."""

    name: str
    label: str = ""
    labels: tuple[str, ...] = ()
    without: bool = False
    """Whether ``labels`` are those left out."""
    is_series: bool = field(default=True, init=False)

    def compute(self, window: Window) -> Minutes:
        known = window.metrics.get(self.name) or {}
        if self.labels:
            known = {label: values for label, values in known.items() if self._has(label)}
        return known or {"": [None] * window.minutes}

    def _has(self, label: str) -> bool:
        # Percentiles have the label {p=99}, counts by label {n=500}, histograms the plain 500.
        wanted = label in self.labels or any(
            label in (f"{{{self.label}={value}}}", _POSITIONS.get(value)) for value in self.labels
        )
        return wanted is not self.without

    def label_fault(self, function: str, args: Sequence[int | None]) -> str | None:
        """What is wrong with the selected labels, if the metric is of that function."""
        if not self.labels:
            return None
        if not FUNCTIONS[function].labelled:
            return f"{self.name} has no labels: it is {function}()"
        known = _known_labels(function, args)
        if known is None:  # whatever the field has
            wrong = [value for value in self.labels if self.label != "n" and value[:3] != "{n="]
            key, there = "n", "'…', the values of the field"
        else:
            single = (replace(self, labels=(value,), without=False) for value in self.labels)
            wrong = [one.labels[0] for one in single if not any(map(one._has, known))]
            key = "p" if known[0].startswith("{") else self.label
            names = [f"'{label.removeprefix('{p=').removesuffix('}')}'" for label in known]
            there = ", ".join(names if len(names) < 9 else [*names[:3], "…", names[-1]])
        if not wrong:
            return None
        word = "label" if len(wrong) == 1 else "labels"
        listed = ", ".join(f"'{value}'" for value in wrong)
        return f"{self.name} has no {word} {self.label}={listed}: it has {key}={there}"


@dataclass(frozen=True)
class Binary(Node):
    """Two nodes and what is between them."""

    sign: str
    left: Node
    right: Node

    @property
    def is_series(self) -> bool:  # type: ignore[override]
        return self.left.is_series or self.right.is_series

    @property
    def is_condition(self) -> bool:
        """Whether its values are 1 and 0, for true and false."""
        return self.sign in COMPARISONS or self.sign in LOGIC

    def parts(self) -> Iterable[Node]:
        return self.left, self.right

    def compute(self, window: Window) -> Minutes:
        left, right = self.left.compute(window), self.right.compute(window)
        result: dict[str, list[Number]] = {}
        for label in _labels(left, right):
            pairs = _pairs(_of(left, label), _of(right, label))
            result[label] = [self._combine(one, two, window.absent) for one, two in pairs]
        return result

    def _combine(self, one: Number, two: Number, absent: Number) -> Number:
        if self.sign in LOGIC:
            return float(LOGIC[self.sign](bool(one), bool(two)))
        if one is None or two is None:
            return absent if self.sign in COMPARISONS else None
        if self.sign in COMPARISONS:
            return float(COMPARISONS[self.sign](one, two))
        try:
            return ARITHMETIC[self.sign](one, two)
        except (ZeroDivisionError, OverflowError):
            return None


@dataclass(frozen=True)
class Negative(Node):
    """A node with its sign changed."""

    of: Node

    @property
    def is_series(self) -> bool:  # type: ignore[override]
        return self.of.is_series

    def parts(self) -> Iterable[Node]:
        return (self.of,)

    def compute(self, window: Window) -> Minutes:
        return _map_values(self.of.compute(window), lambda value: -value)


@dataclass(frozen=True)
class OverTime(Node):
    """One number of all minutes: their sum, mean, and so on; minutes without a value are left out.

    The sum of a condition is the number of minutes in which it was true.
    """

    function: str
    of: Node

    def parts(self) -> Iterable[Node]:
        return (self.of,)

    def compute(self, window: Window) -> Minutes:
        result: dict[str, list[Number]] = {}
        for label, values in self.of.compute(window).items():
            present = [value for value in values if value is not None]
            result[label] = [OVER_TIME[self.function](present) if present else None]
        return result


@dataclass(frozen=True)
class OfValue(Node):
    """A function of each value."""

    function: str
    of: Node
    digits: int = 0

    @property
    def is_series(self) -> bool:  # type: ignore[override]
        return self.of.is_series

    def parts(self) -> Iterable[Node]:
        return (self.of,)

    def compute(self, window: Window) -> Minutes:
        if self.function == "round":
            return _map_values(self.of.compute(window), lambda value: round(value, self.digits))
        return _map_values(self.of.compute(window), OF_VALUE[self.function])


@dataclass(frozen=True)
class OverLabels(Node):
    """One number of all labels, for each minute."""

    function: str
    of: Node

    @property
    def is_series(self) -> bool:  # type: ignore[override]
        return self.of.is_series

    def parts(self) -> Iterable[Node]:
        return (self.of,)

    def compute(self, window: Window) -> Minutes:
        combined: list[Number] = []
        for values in zip(*self.of.compute(window).values(), strict=True):
            present = [value for value in values if value is not None]
            combined.append(OVER_TIME[self.function](present) if present else None)
        return {"": combined}


@dataclass(frozen=True)
class Within(Node):
    """A node over the newest minutes only, of a window that may be longer.

    ``applies`` says, by the names of an entity, whether the node applies to it; else it is false.
    """

    minutes: int
    of: Node
    applies: Callable[[tuple[str, ...]], bool] = field(default=lambda names: True, compare=False)

    def parts(self) -> Iterable[Node]:
        return (self.of,)

    def compute(self, window: Window) -> Minutes:
        if not self.applies(window.names):
            return {"": [0.0]}
        return self.of.compute(window.last(self.minutes))


COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
}
LOGIC: Mapping[str, Callable[[bool, bool], bool]] = {
    "&&": lambda one, two: one and two,
    "||": lambda one, two: one or two,
}
ARITHMETIC: Mapping[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "%": math.fmod,
}
OVER_TIME: Mapping[str, Callable[[Sequence[float]], float]] = {
    "avg": lambda values: sum(values) / len(values),
    "count": lambda values: float(len(values)),
    "latest": lambda values: values[-1],
    "max": max,
    "min": min,
    "sum": sum,
}
OF_VALUE: Mapping[str, Callable[[float], float]] = {
    "abs": abs,
    "ceil": math.ceil,
    "floor": math.floor,
}
NOT_SUPPORTED = (
    *("avg_labels", "baseline", "decrease", "increase", "is_present", "latest_labels", "rate"),
    *("relabels", "sort_label_values", "sort_values", "top_n", "top_n_of", "view_as_seq"),
)
"""Functions that MQE has and that are not read here."""
LABEL_FUNCTIONS = ("avg", "max", "min", "sum")


def _map_values(values: Minutes, function: Callable[[float], float]) -> Minutes:
    return {
        label: [None if value is None else function(value) for value in numbers]
        for label, numbers in values.items()
    }


def _labels(left: Minutes, right: Minutes) -> Iterable[str]:
    """The labels of a combination: a side without labels is combined with each of the other's."""
    if set(left) == {""}:
        return right
    return left if set(right) == {""} else [label for label in left if label in right]


def _of(values: Minutes, label: str) -> Sequence[Number]:
    return values[label] if label in values else values[""]


def _pairs(one: Sequence[Number], two: Sequence[Number]) -> Iterable[tuple[Number, Number]]:
    """A single number is combined with every minute."""
    length = max(len(one), len(two))
    one = one if len(one) == length else [*one] * length
    two = two if len(two) == length else [*two] * length
    return zip(one, two, strict=True)


def parse(text: str) -> Node:
    """The tree of an expression; raises :class:`ExpressionError`.

    >>> parse("sum(service_sla / 100 < 95) >= 3").is_series
    False
    """
    return _Parser(text).whole()


class _Parser:
    """Reads one text, token by token; operators bind as in C."""

    _LEVELS = (("||",), ("&&",), ("==", "!="), ("<", "<=", ">", ">="), ("+", "-"), ("*", "/", "%"))

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = list(self._split(text))
        self._at = 0
        self._depth = 0

    def whole(self) -> Node:
        """The tree of all of the text."""
        node = self._level(0)
        if self._at < len(self._tokens):
            raise self._error(f"there is {self._tokens[self._at]!r} behind the end")
        return node

    def _split(self, text: str) -> Iterator[str]:
        position, end = 0, len(text.rstrip())
        while position < end:
            token = _TOKEN.match(text, position)
            if token is None:
                raise self._error(f"{text[position:].strip()[:1]!r} is not allowed")
            yield token.group().strip()
            position = token.end()

    def _level(self, number: int) -> Node:
        if number == len(self._LEVELS):
            return self._unary()
        node = self._level(number + 1)
        while (sign := self._peek()) in self._LEVELS[number]:
            self._at += 1
            node = Binary(sign, node, self._level(number + 1))
        return node

    def _unary(self) -> Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._error(f"there are more than {MAX_DEPTH} parentheses or signs in each other")
        try:
            if self._peek() == "-":
                self._at += 1
                return Negative(self._unary())
            return self._primary()
        finally:
            self._depth -= 1

    def _primary(self) -> Node:
        token = self._take("a metric, a number or a parenthesis")
        if token == "(":
            node = self._level(0)
            self._expect(")")
            return node
        if token[0].isdigit():
            return Constant(float(token))
        if not (token[0].isalpha() or token[0] == "_"):
            raise self._error(f"a metric, a number or a parenthesis is expected, not {token!r}")
        if self._peek() == "(":
            return self._function(token)
        label, values, without = self._selector() if self._peek() == "{" else ("", (), False)
        return MetricValues(token, label, values, without)

    def _function(self, name: str) -> Node:
        if name in NOT_SUPPORTED:
            raise self._error(f"the function {name}() is not supported")
        known = (*OVER_TIME, *OF_VALUE, "round", "aggregate_labels")
        if name not in known:
            raise self._error(f"there is no function {name}(): there are {', '.join(known)}")
        self._expect("(")
        of = self._level(0)
        argument = ""
        if self._peek() == ",":
            self._at += 1
            argument = self._take("an argument")
        self._expect(")")
        if name == "aggregate_labels":
            if argument not in LABEL_FUNCTIONS:
                raise self._error(
                    f"aggregate_labels(…, {' or '.join(LABEL_FUNCTIONS)}) is expected"
                )
            return OverLabels(argument, of)
        if name == "round":
            if argument and not argument.isdecimal():
                raise self._error("round(…, N) needs a whole number of digits")
            return OfValue(name, of, int(argument or 0))
        if argument:
            raise self._error(f"{name}() takes one argument")
        if name in OF_VALUE:
            return OfValue(name, of)
        if not of.is_series:
            raise self._error(f"{name}() of a single number: it needs a metric")
        return OverTime(name, of)

    def _selector(self) -> tuple[str, tuple[str, ...], bool]:
        """``{p='50,99'}``: the name of the label, its values, and whether they are left out."""
        self._expect("{")
        label = self._take("the name of a label")
        sign = self._take("= or !=")
        if sign not in ("=", "!="):
            raise self._error(f"= or != is expected behind the label {label}, not {sign!r}")
        text = self._take("the values of a label in quotes")
        if text[0] not in "'\"":
            raise self._error(f"the values of the label {label} need quotes")
        if self._peek() == ",":
            raise self._error("one label can be selected, not several")
        self._expect("}")
        values = tuple(value.strip() for value in text[1:-1].split(",") if value.strip())
        if not values:
            raise self._error(f"the label {label} has no value")
        return label, values, sign == "!="

    def _peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _take(self, expected: str) -> str:
        if self._at == len(self._tokens):
            raise self._error(f"{expected} is missing at the end")
        self._at += 1
        return self._tokens[self._at - 1]

    def _expect(self, sign: str) -> None:
        if (token := self._take(f"{sign!r}")) != sign:
            raise self._error(f"{sign!r} is expected, not {token!r}")

    def _error(self, why: str) -> ExpressionError:
        return ExpressionError(self._text, why)


def _known_labels(function: str, args: Sequence[int | None]) -> list[str] | None:
    """The labels of a labelled metric's values; None if they come with the events."""
    if function in ("labelCount", "labelAvg"):
        return None
    if function == "histogram":
        step, steps = (arg or 0 for arg in args)
        return [str(step * number) for number in range(steps + 1)]
    return list(_POSITIONS if function == "percentile" else _POSITIONS.values())


def label_faults(node: Node, metrics: Mapping[str, tuple[str, Sequence[int | None]]]) -> list[str]:
    """What is wrong with the labels that an expression selects; ``metrics``: functions by name."""
    parts = [part for part in node.walk() if isinstance(part, MetricValues)]
    faults = [part.label_fault(*metrics[part.name]) for part in parts]
    return [fault for fault in dict.fromkeys(faults) if fault is not None]


def metric_names(node: Node) -> list[str]:
    """The metrics of an expression, each once, in order."""
    names = [part.name for part in node.walk() if isinstance(part, MetricValues)]
    return list(dict.fromkeys(names))
