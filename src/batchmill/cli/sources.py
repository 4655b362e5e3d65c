"""``--sources``: the modules in which a user's own event types are defined."""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path

from batchmill.errors import BatchmillError

SUFFIX = ".py"


class SourcesError(BatchmillError, ImportError):
    """A module with event types cannot be imported; carries ``module`` and ``why``."""

    def __init__(self, module: str, why: str) -> None:
        super().__init__(module, why)
        self.module = module
        self.why = why

    def __str__(self) -> str:
        return (
            f"--sources {self.module} cannot be imported: {self.why}. Give the dotted name of a "
            "module, such as shop.events, or the path of a .py file; modules are looked for where "
            "Python finds them and in the current folder"
        )


def add_sources_option(parser: argparse._ActionsContainer) -> None:
    """Add the option to a command, or to a group of its options."""
    parser.add_argument(
        "--sources",
        action="append",
        default=[],
        metavar="MODULE",
        help="a module, or a .py file, with @source classes: event types of your own; "
        "may be repeated",
    )


def import_sources(modules: Iterable[str]) -> None:
    """Import modules by dotted name or by path, so that scripts may use their event types."""
    for each in modules:
        try:
            if each.endswith(SUFFIX) or "/" in each or "\\" in each:
                _import_file(each)
            else:
                _look_in(Path.cwd())
                importlib.import_module(each)
        except Exception as error:
            # Whatever a module may raise: it is the user's own code.
            raise SourcesError(each, _why(error)) from error


def _import_file(text: str) -> None:
    file = Path(text).resolve()
    # A name of its own for each file: two may be called alike, and one may be given twice.
    name = f"batchmill_sources_{hashlib.sha256(str(file).encode()).hexdigest()[:16]}"
    if name in sys.modules:
        return
    if not file.is_file():
        raise FileNotFoundError("there is no such file")
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"its name does not end with {SUFFIX}")
    _look_in(file.parent)
    # Before it runs: annotations are looked up in the module of their class.
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def _look_in(folder: Path) -> None:
    # Last, so that no file there can stand in for a module of Python's own.
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _why(error: Exception) -> str:
    """What went wrong, in one line, with the place in the user's code."""
    said = " ".join(str(error).split())
    if isinstance(error, FileNotFoundError) and error.errno is None:
        return said
    what = f"{type(error).__name__}: {said}" if said else type(error).__name__
    here = Path(__file__).parent.parent
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<")
        and here not in Path(frame.filename).parents
        and Path(frame.filename).parent.name != "importlib"
    ]
    return f"{what} ({frames[-1].filename}:{frames[-1].lineno})" if frames else what
