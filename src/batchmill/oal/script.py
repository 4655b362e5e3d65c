"""Scripts: parses texts, files and folders, and gathers their metrics into one set."""

from __future__ import annotations

import importlib.resources
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from batchmill.oal.checker import Checker
from batchmill.oal.errors import OalError, in_order
from batchmill.oal.lexer import ScriptText
from batchmill.oal.metric import Metric
from batchmill.oal.parser import Definition, Disabling, parse_statements
from batchmill.oal.states import State
from batchmill.sources import Catalog, UnknownNameError
from batchmill.sources import catalog as known_sources

SUFFIX = ".oal"


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
        lines = [metric.definition for metric in self.metrics]
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
        return any(metric.name == name for metric in self.metrics)

    def __getitem__(self, name: str) -> Metric:
        for metric in self.metrics:
            if metric.name == name:
                return metric
        raise UnknownNameError("metric", name, tuple(metric.name for metric in self.metrics))

    def by_source(self) -> dict[str, tuple[Metric, ...]]:
        """The metrics of each source; sources without one are left out."""
        grouped: dict[str, list[Metric]] = {}
        for metric in self.metrics:
            grouped.setdefault(metric.source, []).append(metric)
        return {source: tuple(metrics) for source, metrics in grouped.items()}

    def states(self, source: str) -> tuple[State, ...]:
        """Every state that the metrics of a source need, each once, in order of first use."""
        metrics = (metric for metric in self.metrics if metric.source == source)
        return tuple(dict.fromkeys(state for metric in metrics for state in metric.states))


def parse(text: str, *, file: str = "<string>", catalog: Catalog | None = None) -> Script:
    """Parse the text of a script; raises :class:`OalErrors` with everything that is wrong.

    >>> script = parse("service_cpm = from(Service.*).cpm();")
    >>> script.metrics[0].values([120], minutes=60)
    2
    """
    errors: list[OalError] = []
    script = read_script(ScriptText(file, text), catalog or known_sources(), errors, {})
    if errors:
        raise in_order(errors)
    return script


def load(
    paths_or_texts: str | Path | Iterable[str | Path], catalog: Catalog | None = None
) -> MetricSet:
    """The metrics of files, folders (every ``*.oal`` in them, at any depth, sorted) and texts.

    A ``Path`` is a file or a folder. A string is one too if it names one or ends with ``.oal``;
    else it is the text of a script, if it holds a parenthesis, as every statement does. A file that
    is named twice is read once. ``disable`` applies to all scripts. Raises :class:`OalErrors` with
    everything that is wrong in any of them.
    """
    given = [paths_or_texts] if isinstance(paths_or_texts, (str, Path)) else paths_or_texts
    errors: list[OalError] = []
    texts = list(_texts(given, errors))
    known = catalog or known_sources()
    names: dict[str, str] = {}
    scripts = [read_script(text, known, errors, names) for text in texts]
    if errors:
        raise in_order(errors)
    return gather(scripts, known)


def core_script() -> Path:
    """The script with the core metrics, which comes with batchmill."""
    return Path(str(importlib.resources.files("batchmill.oal").joinpath("core.oal")))


def read_script(
    text: ScriptText, catalog: Catalog, errors: list[OalError], names: dict[str, str]
) -> Script:
    """Parse a script as far as possible.

    Errors go to ``errors``; ``names`` maps the metrics that are defined already to their places.
    """
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
    disabled = frozenset(name for script in all_scripts for name in script.disabled)
    metrics = (metric for script in all_scripts for metric in script.metrics)
    kept = tuple(metric for metric in metrics if metric.name not in disabled)
    return MetricSet(kept, disabled, catalog)


def _claim_name(
    node: Definition, text: ScriptText, checker: Checker, names: dict[str, str]
) -> None:
    name = node.name.text
    if name in names:
        checker.report(node.name, f"the metric {name!r} is defined already, at {names[name]}")
    else:
        names[name] = str(text.position(node.name.start))


def _texts(given: Iterable[str | Path], errors: list[OalError]) -> Iterator[ScriptText]:
    seen: set[Path] = set()
    for number, entry in enumerate(given, start=1):
        if isinstance(entry, str) and not _is_path(entry):
            yield ScriptText("<string>" if number == 1 else f"<string {number}>", entry)
            continue
        for file in _files(Path(entry), errors):
            if (real := file.resolve()) not in seen:
                seen.add(real)
                if text := _read(file, errors):
                    yield text


def _is_path(text: str) -> bool:
    if "\n" in text or not text.strip():
        return False
    if text.endswith(SUFFIX) or "(" not in text:
        return True
    try:
        return Path(text).exists()
    except (OSError, ValueError):  # too long for a path, or a character that no path has
        return False


def _files(path: Path, errors: list[OalError]) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.rglob(f"*{SUFFIX}") if file.is_file())
    if not files:
        errors.append(OalError(str(path), 1, 1, "", f"the folder holds no *{SUFFIX} file"))
    return files


def _read(file: Path, errors: list[OalError]) -> ScriptText | None:
    try:
        content = file.read_bytes()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        errors.append(OalError(str(file), 1, 1, "", f"the script cannot be read: {why}"))
        return None
    try:
        return ScriptText(str(file), content.decode("utf-8"))
    except UnicodeDecodeError as error:
        # The text before it can be decoded, and tells its line and column.
        before = ScriptText(str(file), content[: error.start].decode("utf-8"))
        at = before.position(len(before.text))
        byte = f"0x{content[error.start]:02x}"
        message = f"the script is not UTF-8: the byte {byte} cannot stand here"
        errors.append(OalError(at.file, at.line, at.column, byte, message))
        return None
