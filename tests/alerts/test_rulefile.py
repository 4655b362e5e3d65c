"""Files with alert rules: what they mean, and what is said of those that are wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchmill.alerts import (
    DEMO_RULES,
    AlertRulesError,
    BurnRate,
    NoData,
    Rule,
    RuleFile,
    Threshold,
    load_rules,
)

WHOLE = """
[[rule]]
name = "slow"
expression = "service_resp_time"
comparison = "> 500"
period = 10
count = 3
silence = 5
repeat_interval = 60
recovery = 2
severity = "critical"
labels = { team = "shop" }
message = "{name} takes {value} ms"
no_data = "keep"
include = ["web"]
exclude_regex = "test-.*"
"""


def load(folder: Path, text: str, name: str = "alerts.toml") -> RuleFile:
    """The rules of a text."""
    path = folder / name
    path.write_text(text)
    return load_rules(path)


def problems(folder: Path, text: str, name: str = "alerts.toml") -> str:
    """What is said of a file that is wrong, without its path."""
    with pytest.raises(AlertRulesError) as caught:
        load(folder, text, name)
    return "\n".join(caught.value.problems)


def test_every_field_of_a_rule(tmp_path: Path) -> None:
    """Each has its place in the rule."""
    [rule] = load(tmp_path, WHOLE).rules
    assert isinstance(rule.condition, Threshold)
    assert rule.condition.text == "service_resp_time > 500 in 3 of 10 minutes"
    assert (rule.condition.period, rule.condition.metrics) == (10, ["service_resp_time"])
    assert (rule.silence, rule.repeat, rule.recovery) == (5, 60, 2)
    assert rule.no_data is NoData.KEEP
    assert rule.alert_labels("web", "d2Vi.1") == {
        "team": "shop",
        "alertname": "slow",
        "severity": "critical",
        "entity": "web",
        "entity_id": "d2Vi.1",
        "entity_name": "web",
    }
    assert rule.message_for("web", "700") == "web takes 700 ms"
    assert rule.scope.applies(("web",))
    assert not rule.scope.applies(("cart",))


def test_defaults(tmp_path: Path) -> None:
    """One minute, all entities, a warning, no silence; a minute without a value does not match."""
    [rule] = load(tmp_path, "rule = [{name='a', expression='x', comparison='> 1'}]").rules
    assert rule.condition.period == 1
    assert (rule.severity, rule.silence, rule.repeat, rule.recovery) == ("warning", 0, 0, 0)
    assert rule.no_data is NoData.OK
    assert rule.scope.applies(("anything",))


def test_count_is_the_whole_period_by_default(tmp_path: Path) -> None:
    """Without a count every minute of the period must match."""
    text = "rule = [{name='a', expression='x', comparison='> 1', period=5}]"
    assert load(tmp_path, text).rules[0].condition.text == "x > 1 in 5 minutes"


def test_condition_in_one_expression(tmp_path: Path) -> None:
    """As MQE has it: without a comparison of its own."""
    [rule] = load(tmp_path, "rule = [{name='a', expression='avg(x) > 1', period=5}]").rules
    assert rule.condition.text == "avg(x) > 1 over 5 minutes"


def test_yaml_has_the_same_fields(tmp_path: Path) -> None:
    """The same rule in YAML."""
    text = "rule:\n- name: a\n  expression: x\n  comparison: '> 1'\n  labels: {team: shop}\n"
    toml = "rule = [{name='a', expression='x', comparison='> 1', labels={team='shop'}}]"
    assert load(tmp_path, text, "a.yaml").rules == load(tmp_path, toml).rules


def test_an_slo_has_a_rule_for_each_window(tmp_path: Path) -> None:
    """By default three pairs of windows, two of them critical."""
    rules = load(tmp_path, "slo = [{name='good', metric='service_sla', objective=99.9}]").rules
    assert [(rule.id, rule.severity) for rule in rules] == [
        ("good/1h", "critical"),
        ("good/6h", "critical"),
        ("good/3d", "warning"),
    ]
    first = rules[0].condition
    assert isinstance(first, BurnRate)
    assert (first.long_minutes, first.short_minutes, first.factor) == (60, 5, 14.4)
    assert first.objective == pytest.approx(0.999)
    assert rules[0].alert_labels("web", "1")["window"] == "1h"


def test_the_rules_of_the_demo() -> None:
    """They can be read."""
    assert [rule.name for rule in load_rules(DEMO_RULES).rules] == [
        "service_errors",
        "service_slow",
        "catalogue_availability",
    ]


def one(**fields: Any) -> str:
    """A file with one rule, valid but for these fields."""
    given = {"name": "a", "expression": "x", "comparison": "> 1", **fields}
    lines = (
        f"{name} = {str(value).lower() if isinstance(value, bool) else repr(value)}"
        for name, value in given.items()
        if value is not None
    )
    return "[[rule]]\n" + "\n".join(lines)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"name": None}, "rule 1: name is missing"),
        ({"name": "a b"}, "rule 'a b': name='a b' is not valid: it must be letters, digits"),
        ({"expression": None}, "rule 'a': expression is missing"),
        ({"expression": "x +"}, "rule 'a': expression: a metric, a number or a parenthesis is"),
        ({"expression": "avg(x)"}, "has one value for all minutes"),
        ({"comparison": "over 5"}, "comparison='over 5' is not valid: it must be one of > >="),
        ({"comparison": None}, "is no condition: add a comparison"),
        ({"expression": "x > 1", "comparison": None}, "has a value for each minute"),
        ({"expression": "1 > 0", "comparison": None}, "has no metric"),
        ({"comparison": None, "count": 2}, "count needs a comparison"),
        ({"period": 0}, "period=0 is not valid: it must be a whole number from 1 to 1,440"),
        ({"period": True}, "period=True is not valid"),
        ({"period": 3, "count": 4}, "count=4 is not valid: it must be a whole number from 1 to 3"),
        ({"silence": -1}, "silence=-1 is not valid"),
        ({"repeat_interval": 0}, "repeat_interval=0 is not valid"),
        ({"severity": "very bad"}, "severity='very bad' is not valid: it must be one word"),
        ({"no_data": "maybe"}, 'it must be "ok" or "firing" or "keep"'),
        ({"include": "web"}, "include='web' is not valid: it must be a list of names"),
        ({"include_regex": "("}, "include_regex='(' is not valid: it must be a regular expression"),
        ({"message": ""}, "message='' is not valid: it must be a text that is not empty"),
        ({"treshold": 4}, "there is no field treshold"),
        ({"perod": 4}, "there is no field perod; did you mean period?"),
    ],
)
def test_wrong_fields(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    """The message names the rule, the field, its value and what is allowed."""
    assert said in problems(tmp_path, one(**fields))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "there is no rule in it"),
        ("rule = 5", "rule must be a list of tables"),
        ("alerts = []", "there is no field alerts"),
        ("[[rule]\n", "it cannot be read"),
        (one() + "\n" + one(), "rule 'a': there is another rule of that name"),
        (one(labels=None) + "\nlabels = {severity='x'}", "the label severity is set by batchmill"),
        (one() + "\nlabels = {'a-b'='x'}", "the label 'a-b' must have letters"),
        (one() + "\nlabels = {a=1}", "must be a table of texts"),
        ("slo = [{name='s', metric='x'}]", "slo 's': objective is missing"),
        ("slo = [{name='s', metric='x', objective=100}]", "above 0 and below 100"),
        (
            "slo = [{name='s', metric='x', objective=99, no_data='firing'}]",
            'it must be "ok" or "keep"',
        ),
        (
            "slo = [{name='s', metric='x', objective=99, "
            "windows=[{long='5m', short='1h', burn_rate=2}]}]",
            "short='1h' must be shorter than long='5m'",
        ),
        (
            "slo = [{name='s', metric='x', objective=99, "
            "windows=[{long='5x', short='1m', burn_rate=2}]}]",
            "windows: long='5x' is not valid: it must be a duration",
        ),
    ],
)
def test_wrong_files(tmp_path: Path, text: str, said: str) -> None:
    """Whatever is wrong with a file as a whole, or with an SLO."""
    assert said in problems(tmp_path, text)


def test_all_problems_are_listed(tmp_path: Path) -> None:
    """Not only the first: each has a line with the path of the file."""
    with pytest.raises(AlertRulesError) as caught:
        load(tmp_path, one(period=0, silence=-1))
    lines = str(caught.value).splitlines()
    assert len(lines) == 2
    assert all(line.startswith(f"{tmp_path / 'alerts.toml'}: rule 'a': ") for line in lines)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    """And those that are of no known kind."""
    with pytest.raises(AlertRulesError, match="there is no such file"):
        load_rules(tmp_path / "a.toml")
    with pytest.raises(AlertRulesError, match=r"must end with \.toml, \.yml or \.yaml"):
        load_rules(tmp_path / "a.json")


def test_scope_by_regular_expression() -> None:
    """A name must match completely; both lists and expressions count."""
    from batchmill.alerts import Scope

    scope = Scope(include_regex="web-.*", exclude=("web-9",))
    assert scope.applies(("web-1",))
    assert not scope.applies(("my web-1",))
    assert not scope.applies(("web-9",))


def rules_by_name(file: RuleFile) -> dict[str, Rule]:
    """The rules of a file."""
    return {rule.name: rule for rule in file.rules}


OLD = """
rules:
  service_sla_rule:
    metrics-name: service_sla
    op: "<"
    threshold: 8000
    period: 10
    count: 2
    silence-period: 3
    message: Successful rate of service {name} is lower than 80%
    tags:
      level: CRITICAL
      team: shop
  percentile_rule:
    metrics-name: service_percentile
    op: ">"
    threshold: 1000,-,-,-,2000
    period: 10
    count: 3
    only-as-condition: true
  endpoint_rule:
    metrics-name: endpoint_resp_time
    op: ">"
    threshold: 1000
    include-names-regex: "GET .*"
    include-labels-regex: "x"
composite-rules:
  both_rule:
    expression: service_sla_rule && percentile_rule
    message: "{name} fails and is slow"
    tags: {level: CRITICAL}
  broken_rule:
    expression: service_sla_rule && other_rule
webhooks:
  - http://127.0.0.1/hook
"""
NEW = """
rules:
  resp_time_rule:
    expression: sum(service_resp_time > 1000) >= 3
    period: 10
    silence-period: 5
    recovery-observation-period: 2
    message: Response time of service {name} is more than 1000ms
    include-names: [web]
    hooks: [webhook.default]
  percentile_rule:
    expression: sum(service_percentile{p='50,75,90,95,99'} > 1000) >= 3
    period: 10
  comp_rule:
    expression: (avg(service_sla / 100) > 80) && (avg(service_percentile{p='50'}) > 1000)
    period: 10
    tags: {level: CRITICAL}
  baseline_rule:
    expression: sum(service_resp_time > baseline(service_resp_time, upper)) > 3
hooks:
  webhook:
    default:
      is-default: true
      urls: [http://127.0.0.1/hook]
"""


def test_older_rules_of_skywalking(tmp_path: Path) -> None:
    """Metric, operator, threshold and count; tags are labels, the level is the severity."""
    rules = rules_by_name(load(tmp_path, OLD, "alarm-settings.yml"))
    rule = rules["service_sla_rule"]
    assert rule.condition.text == "service_sla < 8000 in 2 of 10 minutes"
    assert (rule.severity, dict(rule.labels)) == ("critical", {"team": "shop"})
    # It notifies again when the silence is over.
    assert (rule.silence, rule.repeat) == (3, 4)
    assert set(rules) == {"service_sla_rule", "both_rule"}
    assert rules["both_rule"].condition.metrics == ["service_sla", "service_percentile"]


def test_newer_rules_of_skywalking(tmp_path: Path) -> None:
    """Expressions in MQE."""
    rules = rules_by_name(load(tmp_path, NEW, "alarm-settings.yml"))
    assert set(rules) == {"resp_time_rule", "percentile_rule", "comp_rule"}
    rule = rules["resp_time_rule"]
    assert rule.condition.text == "sum(service_resp_time > 1000) >= 3 over 10 minutes"
    assert (rule.silence, rule.recovery, rule.scope.include) == (5, 2, ("web",))
    assert rules["comp_rule"].severity == "critical"


def test_what_of_skywalking_is_not_read_is_listed(tmp_path: Path) -> None:
    """Rule by rule, with the reason."""
    old = "\n".join(load(tmp_path, OLD, "alarm-settings.yml").left_out)
    assert "webhooks: name the receivers" in old
    assert "rule endpoint_rule: include-labels-regex is not supported" in old
    assert "composite rule broken_rule: there is no rule other_rule" in old
    new = "\n".join(load(tmp_path, NEW, "alarm-settings.yml").left_out)
    assert "hooks: name the receivers" in new
    assert "rule resp_time_rule: hooks are not read" in new
    assert "rule baseline_rule: expression: the function baseline() is not supported" in new


def test_a_file_of_skywalking_without_a_rule_that_can_be_read(tmp_path: Path) -> None:
    """It is refused, with the reasons."""
    text = "rules:\n  a_rule:\n    metrics-name: x\n    op: '~'\n    threshold: ten\n"
    said = problems(tmp_path, text, "alarm-settings.yml")
    assert "it has no rule that can be read" in said
    assert "op='~' is not valid" in said
    assert "threshold='ten' is not valid" in said
