"""Reads SkyWalking's ``alarm-settings.yml``: rules, in both of its forms, and composite rules.

A rule has an ``expression`` in MQE, or, as before SkyWalking 9.6, ``metrics-name``, ``op``,
``threshold`` and ``count``. What cannot be read is left out, rule by rule, and listed with the
reason: hooks, functions of MQE such as ``baseline()``, and fields that mean nothing here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from batchmill.alerts.errors import AlertRulesError
from batchmill.alerts.expression import (
    COMPARISONS,
    Binary,
    Constant,
    MetricValues,
    Node,
    OverLabels,
    OverTime,
    Within,
)
from batchmill.alerts.rulefile import LABEL, WORD, Fields, RuleFile, whole_condition
from batchmill.alerts.rules import (
    DEFAULT_MESSAGE,
    RESERVED_LABELS,
    Rule,
    Scope,
    Threshold,
    count_text,
)
from batchmill.wording import count_of

DEFAULT_PERIOD = 10
_RANKS = ("50", "75", "90", "95", "99")
_OPERATORS = {"=": "==", **{sign: sign for sign in COMPARISONS}}
_FIELDS = (
    *("expression", "metrics-name", "op", "threshold", "count", "period", "silence-period"),
    *("message", "tags", "include-names", "exclude-names", "include-names-regex"),
    *("exclude-names-regex", "include-labels", "exclude-labels", "only-as-condition"),
    *("recovery-observation-period", "hooks"),
)
_NOT_READ = {"include-labels-regex": "a regular expression of labels"}
_NOT_READ["exclude-labels-regex"] = _NOT_READ["include-labels-regex"]
_COMPOSITE_FIELDS = ("expression", "message", "tags", "hooks")
_NAME_IN_COMPOSITE = re.compile(r"\s*(&&|\|\||[()]|[A-Za-z_][A-Za-z0-9_.-]*)")


def read_settings(path: str, content: Mapping[str, Any]) -> RuleFile:
    """The rules of such a file; raises :class:`AlertRulesError` if there are none."""
    left_out: list[str] = []
    for key in content:
        if key not in ("rules", "composite-rules"):
            left_out.append(f"{key}: name the receivers with alerts_to or --to")
    given, composites = content.get("rules") or {}, content.get("composite-rules") or {}
    for key, value in (("rules", given), ("composite-rules", composites)):
        if not isinstance(value, dict):
            raise AlertRulesError(path, (f"{key} must be a mapping of rules by name",))
    read: dict[str, Rule] = {}
    conditions: set[str] = set()
    for name, entry in given.items():
        fields = Fields(entry if isinstance(entry, dict) else {}, f"rule {name}", left_out)
        if not isinstance(entry, dict):
            fields.wrong("it must be a mapping")
        elif (rule := _rule(str(name), fields)) is not None:
            read[str(name)] = rule
            if entry.get("only-as-condition") is True:
                conditions.add(str(name))
    rules = [rule for name, rule in read.items() if name not in conditions]
    for name, entry in composites.items():
        fields = Fields(
            entry if isinstance(entry, dict) else {}, f"composite rule {name}", left_out
        )
        if not isinstance(entry, dict):
            fields.wrong("it must be a mapping")
        elif (composite := _composite(str(name), fields, read)) is not None:
            rules.append(composite)
    if not rules:
        raise AlertRulesError(path, ("it has no rule that can be read", *left_out))
    return RuleFile(path, tuple(rules), tuple(left_out))


def _rule(name: str, fields: Fields) -> Rule | None:
    _note_unread(fields, _FIELDS)
    period = fields.whole("period", DEFAULT_PERIOD, 1)
    condition = _mqe(fields, period) if "expression" in fields.given else _plain(fields, period)
    scope = Scope(
        include=fields.texts("include-names"),
        exclude=fields.texts("exclude-names"),
        include_regex=fields.regex("include-names-regex"),
        exclude_regex=fields.regex("exclude-names-regex"),
    )
    # SkyWalking notifies again once the silence is over, if the condition still holds.
    silence = fields.whole("silence-period", period, 0)
    recovery = fields.whole("recovery-observation-period", 0, 0)
    return _made(
        name, fields, condition, scope=scope, silence=silence, repeat=silence + 1, recovery=recovery
    )


def _mqe(fields: Fields, period: int) -> Threshold | None:
    node = fields.expression("expression")
    return None if node is None else whole_condition(fields, node, period)


def _plain(fields: Fields, period: int) -> Threshold | None:
    """The older form: a metric, an operator, a threshold, a count."""
    metric = fields.word("metrics-name", None, LABEL, "the name of a metric")
    sign = _OPERATORS.get(str(fields.given.get("op", "")).strip())
    if sign is None:
        fields.invalid("op", f"one of {' '.join(_OPERATORS)}")
    count = fields.whole("count", 1, 1)
    values = _selected(fields, metric)
    thresholds = _thresholds(fields)
    if not fields.valid or sign is None or not thresholds:
        return None
    if len(thresholds) == 1:
        per_minute: Node = Binary(sign, values, Constant(thresholds[0]))
        compared = f"{metric} {sign} {thresholds[0]:g}"
    else:
        # One for each percentile; they are labelled by rank.
        pairs = [
            (rank, threshold)
            for rank, threshold in zip(_RANKS, thresholds, strict=False)
            if not math.isnan(threshold)
        ]
        parts = [
            Binary(sign, MetricValues(metric, "p", (rank,)), Constant(threshold))
            for rank, threshold in pairs
        ]
        compared = " or ".join(f"{metric} p{rank} {sign} {limit:g}" for rank, limit in pairs)
        per_minute = _unlabelled(parts)
    condition = Binary(">=", OverTime("sum", per_minute), Constant(float(count)))
    return Threshold(
        condition=condition, period=period, text=f"{compared} {count_text(count, period)}"
    )


def _unlabelled(parts: list[Binary]) -> Node:
    """Whether any of several conditions holds, though each has a label of its own."""
    nodes: list[Node] = [OverLabels("max", part) for part in parts]
    combined = nodes[0]
    for node in nodes[1:]:
        combined = Binary("||", combined, node)
    return combined


def _selected(fields: Fields, metric: str) -> MetricValues:
    include, exclude = fields.texts("include-labels"), fields.texts("exclude-labels")
    if include and exclude:
        fields.wrong("include-labels and exclude-labels together are not supported")
    return MetricValues(metric, "", include or exclude, bool(exclude and not include))


def _thresholds(fields: Fields) -> list[float]:
    """The thresholds; NaN where there is none for a percentile."""
    given = fields.given.get("threshold")
    parts = [part.strip() for part in str(given if given is not None else "").split(",")]
    try:
        numbers = [math.nan if part == "-" else float(part) for part in parts]
    except ValueError:
        numbers = []
    if not numbers or len(numbers) > len(_RANKS) or all(map(math.isnan, numbers)):
        fields.invalid("threshold", "a number, or up to five with commas between them")
        return []
    return numbers


def _composite(name: str, fields: Fields, rules: Mapping[str, Rule]) -> Rule | None:
    """A rule of other rules, joined by ``&&``, ``||`` and parentheses."""
    _note_unread(fields, _COMPOSITE_FIELDS)
    text = fields.text("expression")
    node = _join(text, fields, rules) if text else None
    if node is None:
        return None
    parts = [part for part in node.walk() if isinstance(part, Within)]
    period = max(part.minutes for part in parts)
    condition = Threshold(
        condition=node, period=period, text=f"{text} over {count_of(period, 'minute')}"
    )
    return _made(name, fields, condition, silence=period, repeat=period + 1)


def _join(text: str, fields: Fields, rules: Mapping[str, Rule]) -> Node | None:
    tokens: list[str] = []
    position = 0
    while position < len(text.rstrip()):
        match = _NAME_IN_COMPOSITE.match(text, position)
        if match is None:
            fields.wrong(f"expression={text!r} may have names of rules, &&, || and parentheses")
            return None
        tokens.append(match[1])
        position = match.end()
    for token in tokens:
        if token not in ("&&", "||", "(", ")") and token not in rules:
            fields.wrong(f"there is no rule {token} that could be read")
            return None

    def either() -> Node:
        node = both()
        while tokens and tokens[0] == "||":
            tokens.pop(0)
            node = Binary("||", node, both())
        return node

    def both() -> Node:
        node = one()
        while tokens and tokens[0] == "&&":
            tokens.pop(0)
            node = Binary("&&", node, one())
        return node

    def one() -> Node:
        token = tokens.pop(0)
        if token == "(":
            node = either()
            if tokens.pop(0) != ")":
                raise IndexError
            return node
        if token not in rules:
            raise IndexError
        rule = rules[token]
        assert isinstance(rule.condition, Threshold)
        # By label first: two rules may have labels of different kinds.
        return Within(
            rule.condition.period, _any_label(rule.condition.condition), rule.scope.applies
        )

    try:
        node = either()
        if tokens:
            raise IndexError
    except IndexError:
        fields.wrong(f"expression={text!r} is not complete")
        return None
    return node


def _any_label(node: Node) -> Node:
    return OverLabels("max", node)


def _made(name: str, fields: Fields, condition: Threshold | None, **more: Any) -> Rule | None:
    tags = fields.given.get("tags") or {}
    if not isinstance(tags, dict):
        fields.invalid("tags", "a mapping of texts")
        tags = {}
    texts = {str(key): str(value) for key, value in tags.items()}
    severity = texts.pop("level", "warning").lower()
    if not WORD.fullmatch(severity):
        fields.wrong(f"tags: level={severity!r} is not one word")
    for label in list(texts):
        if not LABEL.fullmatch(label) or label in RESERVED_LABELS:
            fields.wrong(f"tags: {label!r} cannot be a label")
    message = fields.text("message", DEFAULT_MESSAGE)
    if not fields.valid or condition is None:
        return None
    return Rule(
        name=name, condition=condition, severity=severity, labels=texts, message=message, **more
    )


def _note_unread(fields: Fields, known: Any) -> None:
    """List the fields that are not read; the rule is read all the same."""
    was_valid = fields.valid
    if "hooks" in fields.given:
        fields.wrong("hooks are not read: every receiver gets all alerts")
    for name in fields.given:
        if name in _NOT_READ:
            fields.wrong(f"{name} is not supported: {_NOT_READ[name]}, so the rule is left out")
            was_valid = False
        elif name not in known:
            fields.wrong(f"{name} is not read")
    fields.valid = was_valid
