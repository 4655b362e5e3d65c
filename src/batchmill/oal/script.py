"""Scripts: what one says, and what several say together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from batchmill.oal.check import Checker
from batchmill.oal.errors import OalError, in_order
from batchmill.oal.lexer import ScriptText
from batchmill.oal.metric import Metric
from batchmill.oal.parser import parse_statements
from batchmill.oal.states import State
from batchmill.oal.syntax import Definition, Disabling
from batchmill.sources import Catalog, UnknownNameError
from batchmill.sources import catalog as known_sources


@dataclass(frozen=True, slots=True)
class Script:
    """One script: the metrics that it defines, and the names of those that it disables.

    ``str()`` writes it out in its canonical form, which parses to an equal script.
    """

    file: str = field(compare=False)
    metrics: tuple[Metric, ...]
    """In the order of the script, also those that are disabled."""
    disabled: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [each.definition for each in self.metrics]
        return "\n".join([*lines, *(f"disable({name});" for name in self.disabled), ""])


@dataclass(frozen=True)
class MetricSet:
    """The metrics of one or more scripts, without those that any of them disables.

    Iterating gives the metrics in order; ``len()``, ``in`` and ``[name]`` work as expected.
    """

    metrics: tuple[Metric, ...]
    disabled: frozenset[str] = frozenset()
    """Every name that a script disables, whether or not one defines it."""
    catalog: Catalog = field(default_factory=known_sources, compare=False, repr=False)
    """The event types that the metrics were checked against."""

    def __iter__(self) -> Iterator[Metric]:
        return iter(self.metrics)

    def __len__(self) -> int:
        return len(self.metrics)

    def __contains__(self, name: object) -> bool:
        return any(each.name == name for each in self.metrics)

    def __getitem__(self, name: str) -> Metric:
        for each in self.metrics:
            if each.name == name:
                return each
        raise UnknownNameError("metric", name, tuple(each.name for each in self.metrics))

    def by_source(self) -> dict[str, tuple[Metric, ...]]:
        """The metrics of each source; sources without one are left out."""
        found: dict[str, list[Metric]] = {}
        for each in self.metrics:
            found.setdefault(each.source, []).append(each)
        return {source: tuple(metrics) for source, metrics in found.items()}

    def states(self, source: str) -> tuple[State, ...]:
        """Every state that the metrics of a source need, each once, in order of first use."""
        needed = (state for each in self.metrics if each.source == source for state in each.states)
        return tuple(dict.fromkeys(needed))


def parse(text: str, *, file: str = "<string>", catalog: Catalog | None = None) -> Script:
    """The script that a text is; raises :class:`OalErrors` with everything that is wrong.

    >>> script = parse("service_cpm = from(Service.*).cpm();")
    >>> script.metrics[0].values([120], minutes=60)
    2
    """
    errors: list[OalError] = []
    script = read_script(ScriptText(file, text), catalog or known_sources(), errors, {})
    if errors:
        raise in_order(errors)
    return script


def read_script(
    text: ScriptText, catalog: Catalog, errors: list[OalError], names: dict[str, str]
) -> Script:
    """What can be read of a script; faults go to ``errors``, and names to where they stand."""
    checker = Checker(text, catalog, errors)
    metrics: list[Metric] = []
    disabled: list[str] = []
    for statement in parse_statements(text, errors):
        if isinstance(statement, Disabling):
            disabled.append(statement.name.text)
            continue
        _claim_name(statement, text, checker, names)
        if metric := checker.metric(statement):
            metrics.append(metric)
    return Script(text.file, tuple(metrics), tuple(disabled))


def gather(scripts: Iterable[Script], catalog: Catalog) -> MetricSet:
    """The metrics of all scripts together."""
    all_scripts = tuple(scripts)
    disabled = frozenset(name for each in all_scripts for name in each.disabled)
    kept = (one for each in all_scripts for one in each.metrics if one.name not in disabled)
    return MetricSet(tuple(kept), disabled, catalog)


def _claim_name(
    node: Definition, text: ScriptText, checker: Checker, names: dict[str, str]
) -> None:
    name = node.name.text
    if name in names:
        checker.report(node.name, f"the metric {name!r} is defined already, at {names[name]}")
    else:
        names[name] = str(text.position(node.name.start))
