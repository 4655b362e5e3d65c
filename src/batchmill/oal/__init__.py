"""The metric language: scripts in, metric definitions out.

Loads with the standard library alone; what the definitions mean to Spark is Spark's affair.
"""

from batchmill.oal.description import Description, describe
from batchmill.oal.errors import OalError, OalErrors
from batchmill.oal.functions import FUNCTIONS, Arg, Function, Value
from batchmill.oal.loading import core_script, load
from batchmill.oal.metric import Metric
from batchmill.oal.model import Condition, MapKey, Path, Position
from batchmill.oal.numbers import double_limbs, exact_double
from batchmill.oal.script import MetricSet, Script, parse
from batchmill.oal.states import (
    ApdexCount,
    Bucketed,
    Clamped,
    Count,
    DoubleSum,
    Extreme,
    Label,
    LabelSum,
    State,
    Sum,
    Tally,
)

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
    "Label",
    "LabelSum",
    "MapKey",
    "Metric",
    "MetricSet",
    "OalError",
    "OalErrors",
    "Path",
    "Position",
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
    "parse",
]
