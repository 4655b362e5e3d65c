"""Scripts from files, folders and texts, read together as one set of metrics."""

from __future__ import annotations

import importlib.resources
from collections.abc import Iterable, Iterator
from pathlib import Path

from batchmill.oal.errors import OalError, in_order
from batchmill.oal.lexer import ScriptText
from batchmill.oal.script import MetricSet, gather, read_script
from batchmill.sources import Catalog
from batchmill.sources import catalog as known_sources

SUFFIX = ".oal"


def load(
    paths_or_texts: str | Path | Iterable[str | Path], catalog: Catalog | None = None
) -> MetricSet:
    """The metrics of files, folders (every ``*.oal`` in them, at any depth, sorted) and texts.

    A ``Path`` is a file or a folder. A string is one too if it names one or ends with ``.oal``;
    otherwise it is a script's text if it holds a parenthesis, as every statement does. A file that
    is named twice is read once. ``disable`` reaches into every script. Raises
    :class:`OalErrors` with everything that is wrong in any of them.
    """
    given = [paths_or_texts] if isinstance(paths_or_texts, (str, Path)) else paths_or_texts
    errors: list[OalError] = []
    texts = list(_texts(given, errors))
    known = catalog or known_sources()
    names: dict[str, str] = {}
    scripts = [read_script(each, known, errors, names) for each in texts]
    if errors:
        raise in_order(errors)
    return gather(scripts, known)


def core_script() -> Path:
    """The script with the core metrics, which comes with batchmill."""
    return Path(str(importlib.resources.files("batchmill.oal").joinpath("core.oal")))


def _texts(given: Iterable[str | Path], errors: list[OalError]) -> Iterator[ScriptText]:
    seen: set[Path] = set()
    for number, each in enumerate(given, start=1):
        if isinstance(each, str) and not _is_path(each):
            yield ScriptText("<string>" if number == 1 else f"<string {number}>", each)
            continue
        for file in _files(Path(each), errors):
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
    except (OSError, ValueError):  # too long for a path, or with a character that none has
        return False


def _files(path: Path, errors: list[OalError]) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(each for each in path.rglob(f"*{SUFFIX}") if each.is_file())
    if not found:
        errors.append(OalError(str(path), 1, 1, "", f"the folder holds no *{SUFFIX} file"))
    return found


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
        # What stands before the fault is readable, and tells where it is.
        before = ScriptText(str(file), content[: error.start].decode("utf-8"))
        at = before.position(len(before.text))
        byte = f"0x{content[error.start]:02x}"
        message = f"the script is not UTF-8: the byte {byte} cannot stand here"
        errors.append(OalError(at.file, at.line, at.column, byte, message))
        return None
