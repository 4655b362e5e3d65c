"""The metric language OAL: parses scripts into metric definitions.

Gives :func:`load` and :func:`parse`; each :class:`Metric` with the states its rows are reduced to
and the value computed from them; and the errors of scripts. Needs the standard library only.
"""

from batchmill.oal.errors import OalError, OalErrors
from batchmill.oal.functions import FUNCTIONS, Arg, Function, Value
from batchmill.oal.metric import Description, Metric, describe
from batchmill.oal.model import Condition, MapKey, Path, Position
from batchmill.oal.script import MetricSet, Script, core_script, load, parse
from batchmill.oal.states import (
    ApdexCount,
    Bucketed,
    Clamped,
    Count,
    DoubleSum,
    Extreme,
    Label,
    LabelSum,
    LogBucketed,
    State,
    Sum,
    Tally,
)
from batchmill.oal.values import LOG_BITS, RANKS, double_limbs, exact_double, log_floor

__all__ = [
    "ApdexCount",
    "Arg",
    "Bucketed",
    "Clamped",
    "Condition",
    "Count",
    "Description",
    "DoubleSum",
    "Extreme",
    "FUNCTIONS",
    "Function",
    "LOG_BITS",
    "Label",
    "LabelSum",
    "LogBucketed",
    "MapKey",
    "Metric",
    "MetricSet",
    "OalError",
    "OalErrors",
    "Path",
    "Position",
    "RANKS",
    "Script",
    "State",
    "Sum",
    "Tally",
    "Value",
    "core_script",
    "describe",
    "double_limbs",
    "exact_double",
    "load",
    "log_floor",
    "parse",
]
