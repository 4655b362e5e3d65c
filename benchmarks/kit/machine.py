"""Describes the machine of the measurements, without anything that identifies it."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def use_cores(count: int) -> None:
    """Run this process on ``count`` of its cores, where the system lets it choose."""
    usable = _usable_cores()
    if not 1 <= count <= len(usable):
        raise SystemExit(f"--cores {count}: this process may use {len(usable)} cores")
    os.sched_setaffinity(0, usable[:count])


def _usable_cores() -> list[int]:
    """The cores this process may run on; none where the system does not say."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    return sorted(os.sched_getaffinity(0))


def machine() -> dict[str, Any]:
    """The facts that a figure depends on."""
    return {
        "cores": os.cpu_count(),
        "cores_used": len(_usable_cores()) or os.cpu_count(),
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "gil": getattr(sys, "_is_gil_enabled", lambda: True)(),
        "free_threaded_build": bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
        "system": platform.system(),
        "architecture": platform.machine(),
    }


def machine_line() -> str:
    """The same in a line."""
    facts = machine()
    gil = "with the GIL" if facts["gil"] else "without the GIL"
    return (
        f"{facts['cores_used']} of {facts['cores']} cores,"
        f" {facts['implementation']} {facts['python']} {gil},"
        f" {facts['system']} on {facts['architecture']}."
        " The machine may be shared and noisy: read the ratios."
    )


def cpu_s(pid: int) -> float:
    """The processor seconds of a process so far, of all its threads."""
    parts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(parts[11]) + int(parts[12])) / os.sysconf("SC_CLK_TCK")


def tree_cpu_s(pid: int) -> float:
    """The processor seconds of the processes below one, those that have ended included."""
    stats = _stats()
    below = _below(pid, stats)
    ticks = sum(stats[pid][13:15]) + sum(sum(stats[child][11:15]) for child in below)
    return ticks / os.sysconf("SC_CLK_TCK")


def tree_rss_mib(pid: int) -> float:
    """MiB in memory of the processes below one; what they share counts for each of them."""
    stats = _stats()
    pages = sum(stats[child][21] for child in _below(pid, stats))
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def compiler_cpu_s(pid: int) -> float:
    """The processor seconds that a JVM's compiler has taken so far, in the threads that it has.

    With ``-XX:-UseDynamicNumberOfCompilerThreads`` none of them ends.
    """
    ticks = 0
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            name, _, figures = stat.read_text().rpartition(")")
            if re.search(r"\(C[12] Compiler", name):
                ticks += sum(map(int, figures.split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def processes_below(pid: int) -> list[int]:
    """The processes that one has started, and those that they have."""
    return _below(pid, _stats())


def _stats() -> dict[int, list[int]]:
    """The figures of all processes, in the order of proc(5) from its third field on."""
    stats = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            _, *figures = stat.read_text().rpartition(")")[2].split()
            stats[int(stat.parent.name)] = [0, *map(int, figures)]
    return stats


def _below(pid: int, stats: Mapping[int, list[int]]) -> list[int]:
    below = [pid]
    for parent in below:
        below += [child for child, figures in stats.items() if figures[1] == parent]
    return below[1:]
