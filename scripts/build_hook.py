"""Build hook of the wheel: compiles the OTLP decoder ``wire.c`` where there is a C compiler.

Without a compiler, or if compiling fails, the wheel has no compiled decoder and the receiver
decodes in Python, with the same results.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

DECODER = Path("src/batchmill/ingest/decode")
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O2", "-shared", "-fPIC", "-std=c11", "-fno-strict-aliasing", "-Wall", "-Wextra")


class BuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the shared library to a wheel, and makes the wheel one for this platform."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; called before a wheel or an editable install is built."""
        folder = Path(self.root) / DECODER
        library = folder / "wire.lib"
        problem = compile_library(folder / "wire.c", library)
        if problem:
            library.unlink(missing_ok=True)  # one of an older source
            self.app.display_warning(f"no compiled OTLP decoder, only the slower one: {problem}")
            return
        build_data["artifacts"].append(f"/{DECODER}/wire.lib")
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"


def compile_library(source: Path, library: Path) -> str:
    """Compile ``source`` as a shared library; the problem, if that cannot be done."""
    wanted = shlex.split(os.environ.get("CC", ""))  # such as "ccache gcc"
    names = wanted[:1] or COMPILERS
    compiler = next((path for name in names if (path := shutil.which(name))), None)
    if compiler is None:
        return "there is no C compiler"
    fresh = library.with_name(f"{library.name}.{os.getpid()}")
    command = [compiler, *wanted[1:], *FLAGS, "-o", str(fresh), str(source), "-lm"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        fresh.unlink(missing_ok=True)
        return f"{compiler} failed: {done.stderr.strip()[-2000:]}"
    fresh.replace(library)  # whole at once: a process may have the old one open
    return ""
