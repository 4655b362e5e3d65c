"""Alerts: rules on metrics, evaluated on closed minutes of a store, and notifications of them.

:func:`load_rules` reads a file of rules, :class:`AlertEngine` evaluates them on a store and sends
webhooks, or alerts to an Alertmanager. State, history and what is to be sent are in the store.
Loads with the standard library alone; YAML and regular expressions take the extra ``alerts``.
"""

from pathlib import Path

from batchmill.alerts.engine import AlertEngine
from batchmill.alerts.errors import AlertRulesError
from batchmill.alerts.expression import ExpressionError
from batchmill.alerts.receivers import Receiver
from batchmill.alerts.rulefile import RuleFile, load_rules
from batchmill.alerts.rules import BurnRate, NoData, Rule, Scope, Threshold
from batchmill.alerts.stats import AlertSettings, AlertStats
from batchmill.alerts.watcher import RuleWatcher

DEMO_RULES = Path(__file__).parent / "demo.toml"
"""The rules of ``batchmill run --demo``."""

__all__ = [
    "AlertEngine",
    "AlertRulesError",
    "AlertSettings",
    "AlertStats",
    "BurnRate",
    "DEMO_RULES",
    "ExpressionError",
    "NoData",
    "Receiver",
    "Rule",
    "RuleFile",
    "RuleWatcher",
    "Scope",
    "Threshold",
    "load_rules",
]
