"""How many CPU cores this process may use: its affinity, and the CPU quota of its container.

A container limited to two CPUs on a machine with 64 cores still sees 64 cores in its affinity. Its
quota is in the control group (cgroup) files of Linux, version 1 or 2.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

_PROCESS = Path("/proc/self")


def available_cores() -> int:
    """How many cores this process may use, at least 1; a quota of 1.5 CPUs counts as 2 cores."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0)) or 1
    else:
        cores = os.cpu_count() or 1
    quota = cpu_quota()
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def cpu_quota(process: Path = _PROCESS) -> float | None:
    """CPUs that the control groups of a process allow; None without a limit.

    A group is also limited by the groups around it, so the least of all their quotas counts.
    ``process`` is its folder in ``/proc``. What cannot be read is no limit.
    """
    quotas = [quota for folder in _group_folders(process) for quota in _quotas_in(folder)]
    return min(quotas, default=None)


def _quotas_in(folder: Path) -> Iterator[float]:
    limits = (_words(folder / "cpu.max"), _words(folder / "cpu.cfs_quota_us"))
    period = _words(folder / "cpu.cfs_period_us")
    for words in (limits[0], limits[1] + period):
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]):
            yield int(words[0]) / int(words[1])  # no limit is "max", or -1 in version 1


def _group_folders(process: Path) -> Iterator[Path]:
    """The folders of the process's CPU control groups, each with those around it."""
    paths = dict(_group_paths(process))
    for version, root, mount_point in _mounts(process):
        path = paths.get(version)
        if path is None:
            continue
        folder = mount_point
        # A path outside of the mounted part is not visible here, but the mount point is.
        if root == "/" or path == root or path.startswith(root + "/"):
            inner = path if root == "/" else path[len(root) :]
            if ".." not in inner.split("/"):
                folder = mount_point / inner.lstrip("/")
        yield folder
        while folder != mount_point:
            folder = folder.parent
            yield folder


def _group_paths(process: Path) -> Iterator[tuple[int, str]]:
    """Version and path of each control group that can limit CPUs."""
    for line in _lines(process / "cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            yield 2, path
        elif "cpu" in controllers.split(","):
            yield 1, path


def _mounts(process: Path) -> Iterator[tuple[int, str, Path]]:
    """Version, mounted part and mount point of each hierarchy that can limit CPUs."""
    for line in _lines(process / "mountinfo"):
        mount, _, source = line.partition(" - ")
        fields, kind = mount.split(" "), source.split(" ")
        if len(fields) < 5 or len(kind) < 3:
            continue
        version = 0
        if kind[0] == "cgroup2":
            version = 2
        elif kind[0] == "cgroup" and "cpu" in kind[2].split(","):
            version = 1
        if version:
            yield version, _unescaped(fields[3]), Path(_unescaped(fields[4]))


def _unescaped(field: str) -> str:
    r"""A field of mountinfo, where a space is written ``\040``."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []


def _words(file: Path) -> list[str]:
    lines = _lines(file)
    return lines[0].split() if lines else []
