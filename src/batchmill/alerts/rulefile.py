"""Files with alert rules: TOML or YAML of our own, or SkyWalking's ``alarm-settings.yml``."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchmill.alerts.errors import AlertRulesError
from batchmill.alerts.expression import (
    COMPARISONS,
    Binary,
    ExpressionError,
    Node,
    metric_names,
    parse,
)
from batchmill.alerts.rules import (
    DEFAULT_MESSAGE,
    MOST_MINUTES,
    RESERVED_LABELS,
    BurnRate,
    NoData,
    Rule,
    Scope,
    Threshold,
    compile_regex,
    count_condition,
    count_text,
)
from batchmill.extras import require_extra

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,99}", re.ASCII)
LABEL = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}", re.ASCII)
WORD = re.compile(r"[A-Za-z0-9_-]{1,100}", re.ASCII)
_DURATION = re.compile(r"([1-9][0-9]{0,4})([mhd])", re.ASCII)
_MINUTES = {"m": 1, "h": 60, "d": 1440}
LONGEST_WINDOW = 30 * 1440
_COMPARISON = re.compile(r"\s*(>=|<=|==|!=|>|<)\s*(-?[0-9]+(?:\.[0-9]+)?)\s*", re.ASCII)

COMMON = (
    *("name", "severity", "labels", "message", "no_data", "silence", "repeat_interval"),
    *("recovery", "include", "exclude", "include_regex", "exclude_regex"),
)
RULE_FIELDS = ("expression", "comparison", "period", "count", *COMMON)
SLO_FIELDS = ("metric", "objective", "windows", *COMMON)
WINDOW_FIELDS = ("long", "short", "burn_rate", "severity")
DEFAULT_WINDOWS: Sequence[Mapping[str, Any]] = (
    {"long": "1h", "short": "5m", "burn_rate": 14.4, "severity": "critical"},
    {"long": "6h", "short": "30m", "burn_rate": 6, "severity": "critical"},
    {"long": "3d", "short": "6h", "burn_rate": 1, "severity": "warning"},
)
"""Two pages and a ticket: 2 % of a month's budget in an hour, 5 % in six, 10 % in three days."""


@dataclass(frozen=True)
class RuleFile:
    """The rules of a file."""

    path: str
    rules: tuple[Rule, ...]
    left_out: tuple[str, ...] = ()
    """What of a SkyWalking file is not read, and why."""


def load_rules(path: str | Path) -> RuleFile:
    """Read a file; raises :class:`AlertRulesError` with everything that is wrong in it.

    A file that ends with ``.toml`` is TOML, with ``.yml`` or ``.yaml`` YAML. YAML with a mapping
    ``rules`` is SkyWalking's format; see :mod:`batchmill.alerts.skywalking`.
    """
    path = Path(path)
    content = _read(path)
    if "rules" in content or "composite-rules" in content:
        from batchmill.alerts.skywalking import read_settings

        return read_settings(str(path), content)
    problems: list[str] = []
    rules: list[Rule] = []
    for key in content:
        if key not in ("rule", "slo"):
            problems.append(unknown("field", str(key), ("rule", "slo")))
    for key, read in (("rule", _rule), ("slo", _slo)):
        given = content.get(key, [])
        if not isinstance(given, list) or not all(isinstance(entry, dict) for entry in given):
            problems.append(f"{key} must be a list of tables, [[{key}]] in TOML")
            continue
        for number, entry in enumerate(given, 1):
            fields = Fields(entry, f"{key} {entry.get('name', number)!r}", problems)
            rules += read(fields)
    if not rules and not problems:
        problems.append("there is no rule in it: add a table [[rule]] or [[slo]]")
    _check_names(rules, problems)
    if problems:
        raise AlertRulesError(str(path), tuple(problems))
    return RuleFile(str(path), tuple(rules))


def _check_names(rules: Iterable[Rule], problems: list[str]) -> None:
    known: set[str] = set()
    for rule in rules:
        if rule.id in known:
            problems.append(f"rule {rule.id!r}: there is another rule of that name")
        known.add(rule.id)


def _read(path: Path) -> Mapping[str, Any]:
    suffix = path.suffix.lower()
    if suffix not in (".toml", ".yml", ".yaml"):
        raise AlertRulesError(str(path), ("the name must end with .toml, .yml or .yaml",))
    try:
        if suffix == ".toml":
            content: Any = tomllib.loads(path.read_text("utf-8"))
        else:
            content = _yaml(path)
    except FileNotFoundError:
        raise AlertRulesError(str(path), ("there is no such file",)) from None
    except OSError as error:
        raise AlertRulesError(str(path), (error.strerror or str(error),)) from error
    except ValueError as error:  # not TOML, or not UTF-8
        raise AlertRulesError(str(path), (f"it cannot be read: {error}",)) from error
    if not isinstance(content, dict):
        raise AlertRulesError(str(path), ("it must be a mapping with rules",))
    return content


def _yaml(path: Path) -> Any:
    require_extra("a file of rules in YAML", "alerts", "yaml")
    import yaml

    try:
        return yaml.safe_load(path.read_text("utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error


class Fields:
    """The fields of one rule; every one that is not valid is added to ``problems``."""

    def __init__(self, given: Mapping[str, Any], where: str, problems: list[str]) -> None:
        self.given = given
        self._where = where
        self._problems = problems
        self.valid = True

    def wrong(self, text: str) -> None:
        """Note that something is wrong."""
        self.valid = False
        self._problems.append(f"{self._where}: {text}")

    def invalid(self, name: str, allowed: str) -> None:
        """Note that a field has a value that is not allowed."""
        self.wrong(f"{name}={self.given.get(name)!r} is not valid: it must be {allowed}")

    def only(self, known: Sequence[str]) -> None:
        """Note every field that is not known."""
        for name in self.given:
            if name not in known:
                self.wrong(unknown("field", str(name), known))

    def text(self, name: str, default: str | None = None) -> str:
        """A text; without a default it is required."""
        value = self.given.get(name, default)
        if value is None:
            self.wrong(f"{name} is missing")
        elif not isinstance(value, str) or not value.strip():
            self.invalid(name, "a text that is not empty")
        else:
            return value
        return ""

    def word(self, name: str, default: str | None, pattern: re.Pattern[str], allowed: str) -> str:
        """A text of a pattern."""
        value = self.text(name, default)
        if value and not pattern.fullmatch(value):
            self.invalid(name, allowed)
        return value

    def whole(self, name: str, default: int, least: int, most: int = MOST_MINUTES) -> int:
        """A whole number."""
        value = self.given.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            self.invalid(name, f"a whole number from {least:,} to {most:,}")
            return default
        return value

    def number(self, name: str, least: float, most: float) -> float:
        """A number between two others, which are not allowed themselves."""
        value = self.given.get(name)
        if value is None:
            self.wrong(f"{name} is missing")
            return 0.0
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not least < value < most
        ):
            self.invalid(name, f"a number above {least:g} and below {most:g}")
            return 0.0
        return float(value)

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of texts."""
        value = self.given.get(name, [])
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            self.invalid(name, "a list of names")
            return ()
        return tuple(value)

    def regex(self, name: str) -> str:
        """A regular expression of RE2."""
        value = self.given.get(name, "")
        try:
            if not isinstance(value, str):
                raise ValueError("not a text")
            compile_regex(value)
        except ValueError as error:
            self.invalid(name, f"a regular expression of RE2 ({error})")
            return ""
        return value

    def expression(self, name: str) -> Node | None:
        """An expression."""
        text = self.text(name)
        if not text:
            return None
        try:
            return parse(text)
        except ExpressionError as error:
            self.wrong(f"{name}: {error}")
            return None

    def minutes(self, name: str) -> int:
        """A duration, in minutes."""
        value = self.given.get(name)
        match = _DURATION.fullmatch(value) if isinstance(value, str) else None
        minutes = int(match[1]) * _MINUTES[match[2]] if match else 0
        if not 1 <= minutes <= LONGEST_WINDOW:
            self.invalid(name, 'a duration such as "5m", "6h" or "3d", up to "30d"')
        return minutes

    def labels(self) -> dict[str, str]:
        """The labels of a rule."""
        value = self.given.get("labels", {})
        if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
            self.invalid("labels", "a table of texts")
            return {}
        for label in value:
            if not isinstance(label, str) or not LABEL.fullmatch(label):
                self.wrong(f"the label {label!r} must have letters, digits and _ only")
            elif label in RESERVED_LABELS:
                self.wrong(f"the label {label} is set by batchmill: choose another name")
        return dict(value)

    def common(self) -> dict[str, Any]:
        """What all kinds of rules have, as arguments of :class:`Rule`."""
        return {
            "name": self.word("name", None, NAME, "letters, digits, _ and -, up to 100"),
            "severity": self.word("severity", "warning", WORD, "one word, such as critical"),
            "labels": self.labels(),
            "message": self.text("message", DEFAULT_MESSAGE),
            "silence": self.whole("silence", 0, 0),
            "repeat": self.whole("repeat_interval", 0, 1) if "repeat_interval" in self.given else 0,
            "recovery": self.whole("recovery", 0, 0),
            "scope": Scope(
                include=self.texts("include"),
                exclude=self.texts("exclude"),
                include_regex=self.regex("include_regex"),
                exclude_regex=self.regex("exclude_regex"),
            ),
        }


def _rule(fields: Fields) -> list[Rule]:
    fields.only(RULE_FIELDS)
    common = fields.common()
    no_data = _no_data(fields, tuple(NoData))
    node = fields.expression("expression")
    condition: Threshold | None = None
    if "comparison" in fields.given:
        condition = _compared(fields, node)
    else:
        if "count" in fields.given:
            fields.wrong('count needs a comparison, such as comparison = "> 500"')
        period = fields.whole("period", 1, 1)
        if node is not None:
            condition = whole_condition(fields, node, period)
    if not fields.valid or condition is None:
        return []
    return [Rule(condition=condition, no_data=no_data, **common)]


def _compared(fields: Fields, node: Node | None) -> Threshold | None:
    period = fields.whole("period", 1, 1)
    count = fields.whole("count", period, 1, max(1, period))
    comparison = fields.text("comparison")
    match = _COMPARISON.fullmatch(comparison)
    if match is None:
        if comparison:
            fields.invalid("comparison", f'one of {" ".join(COMPARISONS)} and a number: "< 95"')
        return None
    if node is None:
        return None
    if not node.is_series:
        fields.wrong(
            f"expression={fields.given['expression']!r} has one value for all minutes: with a "
            "comparison it needs one for each, so leave sum() or avg() out"
        )
        return None
    sign, threshold = match[1], float(match[2])
    text = f"{fields.given['expression']} {sign} {threshold:g} {count_text(count, period)}"
    condition = count_condition(node, sign, threshold, count)
    return Threshold(condition=condition, period=period, text=text)


def whole_condition(fields: Fields, node: Node, period: int) -> Threshold | None:
    """A condition that is written as one expression, such as ``avg(service_sla) < 9500``."""
    text = str(fields.given["expression"]).strip()
    if not isinstance(node, Binary) or not node.is_condition:
        fields.wrong(
            f"expression={text!r} is no condition: add a comparison, or compare in the expression"
        )
    elif node.is_series:
        fields.wrong(
            f"expression={text!r} has a value for each minute: count the minutes with sum(…) >= N, "
            "or use avg(), max(), min() or latest() before the comparison"
        )
    elif not metric_names(node):
        fields.wrong(f"expression={text!r} has no metric")
    else:
        over = f"over {period} minutes" if period > 1 else "in 1 minute"
        return Threshold(condition=node, period=period, text=f"{text} {over}")
    return None


def _slo(fields: Fields) -> list[Rule]:
    fields.only(SLO_FIELDS)
    common = fields.common()
    no_data = _no_data(fields, (NoData.OK, NoData.KEEP))
    metric = fields.word("metric", None, LABEL, "the name of a metric")
    objective = fields.number("objective", 0, 100) / 100
    given = fields.given.get("windows", list(DEFAULT_WINDOWS))
    if not isinstance(given, list) or not given or not all(isinstance(one, dict) for one in given):
        fields.invalid("windows", "a list of tables with long, short and burn_rate")
        return []
    rules = []
    for entry in given:
        window = Fields(entry, f"{fields._where}: windows", fields._problems)
        window.only(WINDOW_FIELDS)
        long, short = window.minutes("long"), window.minutes("short")
        factor = window.number("burn_rate", 0, 100_000)
        severity = window.word("severity", common["severity"], WORD, "one word, such as critical")
        if window.valid and short >= long:
            window.wrong(f"short={entry['short']!r} must be shorter than long={entry['long']!r}")
        if window.valid and fields.valid:
            burn = BurnRate(
                metric=metric,
                objective=objective,
                long_minutes=long,
                short_minutes=short,
                factor=factor,
            )
            own = {**common, "severity": severity}
            rules.append(Rule(condition=burn, window=entry["long"], no_data=no_data, **own))
    return rules


def _no_data(fields: Fields, allowed: Sequence[NoData]) -> NoData:
    value = fields.given.get("no_data", NoData.OK.value)
    for choice in allowed:
        if value == choice.value:
            return choice
    fields.invalid("no_data", " or ".join(f'"{choice.value}"' for choice in allowed))
    return NoData.OK


def unknown(what: str, name: str, known: Sequence[str]) -> str:
    """That there is no field of a name, with the nearest one."""
    nearest = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {nearest[0]}?" if nearest else f"there are {', '.join(known)}"
    return f"there is no {what} {name}; {hint}"
