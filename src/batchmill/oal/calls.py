"""Function calls that make sense: the measured value and the arguments of an aggregation."""

from __future__ import annotations

from typing import cast

from batchmill.oal.compare import condition
from batchmill.oal.functions import FUNCTIONS, Arg, Function, Param
from batchmill.oal.model import Path
from batchmill.oal.resolve import Report, resolve, words
from batchmill.oal.syntax import ArgNode, Comparison, Definition, LiteralNode, PathNode, Word
from batchmill.sources import Catalog, SourceType, suggest

_MEASURED = {"whole": "a whole number", "number": "a number"}
_WANTED = {
    "condition": "a condition such as status == true",
    "text": "a field that is a string",
    "label": "a field that is a string, an enum, a bool or a whole number",
    "bool": "a field that is true or false",
    "whole": "a field that is a whole number",
    "count": "a whole number from 1 up",
}
_FITTING = {
    "text": ("string",),
    "label": ("string", "layer", "enum", "bool", "int", "long"),
    "bool": ("bool",),
    "whole": ("int", "long"),
}


def function(word: Word, report: Report) -> Function | None:
    """The function of that name; None where there is none, as reported."""
    found = FUNCTIONS.get(word.text)
    if found is None:
        report(word, f"unknown function {word.text!r}: {_known_functions(word.text)}")
    return found


def value_fits(
    call: Function, source: SourceType, value: Path | None, node: PathNode, report: Report
) -> bool:
    """Whether the function can measure what stands in ``from(...)``."""
    if call.measures == "anything":
        return True
    wanted = _MEASURED[call.measures]
    if value is None:
        numbers = [each.name for each in source.fields.values() if each.type.is_number][:8]
        there = f": one of {', '.join(numbers)}" if numbers else ""
        report(node, f"{call.name}() measures {wanted}: expected a field instead of *{there}")
        return False
    if value.type.is_number if call.measures == "number" else value.type.is_whole:
        return True
    hint = ""
    if value.type.kind == "string":
        hint = f"; read a number from it with from((str->long){source.name}.{value.text})"
    elif value.type.kind == "double" and call.instead:
        hint = f"; use {call.instead}()"
    report(node, f"{call.name}() measures {wanted}, but {value.text} is {words(value.type)}{hint}")
    return False


def args_count_fits(call: Function, node: Definition, report: Report) -> bool:
    """Whether there are as many arguments as the function takes."""
    least = sum(not each.optional for each in call.params)
    if least <= len(node.args) <= len(call.params):
        return True
    names = ", ".join(f"[{each.name}]" if each.optional else each.name for each in call.params)
    whole = Word(node.function.text, node.function.start, node.call_end)
    given = f"{len(node.args)} argument{'s' * (len(node.args) != 1)} given"
    taken = f"expected {call.name}({names})" if names else f"expected none: {call.name}()"
    report(whole, f"{given} to {call.name}(), {taken}")
    return False


def argument(
    catalog: Catalog, source: SourceType, param: Param, node: ArgNode, report: Report
) -> Arg | None:
    """The argument that a node stands for; None where it is not what is wanted, as reported."""
    if param.kind == "condition" and isinstance(node, Comparison):
        return condition(catalog, source, node, report)
    if param.kind == "count" and isinstance(node, LiteralNode) and node.kind == "int":
        return _count(param, node, report)
    if param.kind in _FITTING and isinstance(node, PathNode):
        path = resolve(source, node, report)
        if path is None or path.type.kind in _FITTING[param.kind]:
            return path
        why = f", but {path.text} is {words(path.type)}"
    else:
        why = ""
    report(node, f"the argument {param.name}: expected {_WANTED[param.kind]}{why}")
    return None


def _count(param: Param, node: LiteralNode, report: Report) -> int | None:
    value = cast("int", node.value)
    if 1 <= value <= param.most:
        return value
    most = f" to {param.most}" if param.most < 2**63 - 1 else " up"
    report(node, f"{param.name} must be a whole number from 1{most}, not {value}")
    return None


def _known_functions(name: str) -> str:
    # There are few enough of them to name them all, the likely ones first.
    likely = suggest(name, tuple(FUNCTIONS)).partition("?")
    hint = f"{likely[0]}? " if likely[1] else ""
    return f"{hint}The functions are {', '.join(FUNCTIONS)}"
