"""The third pass: a statement and a catalog make a metric, or a list of what is wrong with it."""

from __future__ import annotations

from collections.abc import Sequence

from batchmill.oal.calls import args_count_fits, argument, function, value_fits
from batchmill.oal.compare import condition
from batchmill.oal.errors import OalError
from batchmill.oal.functions import Arg, Function
from batchmill.oal.lexer import ScriptText
from batchmill.oal.metric import Metric
from batchmill.oal.model import Condition, Path
from batchmill.oal.resolve import Spanned, resolve
from batchmill.oal.syntax import Definition, PathNode
from batchmill.sources import Catalog, SourceType, suggest


class Checker:
    """Checks the definitions of one script against a catalog."""

    def __init__(self, script: ScriptText, catalog: Catalog, errors: list[OalError]) -> None:
        self._script = script
        self._catalog = catalog
        self._errors = errors

    def metric(self, node: Definition) -> Metric | None:
        """The metric that is defined; None where it is not, with every reason reported."""
        before = len(self._errors)
        source = self._catalog.sources.get(node.source.text)
        if source is None:
            known = suggest(node.source.text, tuple(self._catalog.sources))
            self.report(node.source, f"unknown source {node.source.text!r}: {known}")
        call = function(node.function, self.report)
        if call is not None:
            counted = args_count_fits(call, node, self.report)
        if source is None:
            return None
        value = self._value(source, node.value, call)
        filters = [condition(self._catalog, source, each, self.report) for each in node.filters]
        if call is None or not counted:
            return None
        args = self._args(source, call, node)
        if node.decorator is not None and not node.decorator.text.strip():
            self.report(node.decorator, "expected the name of a decorator, but it is blank")
        if len(self._errors) > before:
            return None
        return _made(node, value, filters, args, self._script)

    def report(self, at: Spanned, message: str) -> None:
        """Note a fault."""
        self._errors.append(self._script.error(at.start, at.end, message))

    def _value(self, source: SourceType, node: PathNode, call: Function | None) -> Path | None:
        value = resolve(source, node, self.report) if node.parts else None
        if call is not None and not (value is None and node.parts):
            value_fits(call, source, value, node, self.report)
        return value

    def _args(self, source: SourceType, call: Function, node: Definition) -> list[Arg | None]:
        return [
            argument(self._catalog, source, param, each, self.report)
            for param, each in zip(call.params, node.args, strict=False)
        ]


def _made(
    node: Definition,
    value: Path | None,
    filters: Sequence[Condition | None],
    args: Sequence[Arg | None],
    script: ScriptText,
) -> Metric:
    return Metric(
        name=node.name.text,
        source=node.source.text,
        value=value,
        filters=tuple(each for each in filters if each is not None),
        function=node.function.text,
        args=tuple(each for each in args if each is not None),
        decorator=node.decorator.text if node.decorator else None,
        where=script.position(node.name.start),
    )
