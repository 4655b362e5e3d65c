"""Which processes of a run are stopped: by SIGSTOP, a debugger or a frozen terminal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

_PROC = Path("/proc")
_STOPPED = ("T", "t")


def stopped_processes(leaders: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Of process groups, by name, the processes that are stopped; ``leaders`` have their ids.

    A group is a process of a run with what it has started: a JVM may be stopped alone. Empty where
    the system has no ``/proc``.
    """
    names = {pid: name for name, pid in leaders.items()}
    stopped: dict[str, tuple[int, ...]] = {}
    for stat in _PROC.glob("[0-9]*/stat") if names else ():
        try:
            # The name of the program, in brackets, may have any character.
            state, _, group = stat.read_bytes().rpartition(b")")[2].split()[:3]
        except (OSError, ValueError):  # it has ended
            continue
        pid = int(stat.parent.name)
        name = names.get(pid) or names.get(int(group))
        if name is not None and state.decode() in _STOPPED:
            stopped[name] = (*stopped.get(name, ()), pid)
    return stopped
