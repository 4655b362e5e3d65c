"""The cores a process may use: its affinity, and the CPU quota of its control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from batchmill import cores
from batchmill.cores import available_cores, cpu_quota

V2_MOUNT = "31 23 0:28 {root} {mount} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNT = "32 23 0:29 {root} {mount} rw,nosuid - cgroup cgroup rw,cpu,cpuacct"


class Machine:
    """A process folder and mounted control groups, with files as the kernel writes them."""

    def __init__(self, folder: Path) -> None:
        self.process = folder / "proc"
        self.mount = folder / "sys fs cgroup"  # the kernel writes its spaces as \040
        self.process.mkdir()
        self.mount.mkdir()
        self.mounts = ["22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw"]

    def groups(self, *lines: str) -> None:
        (self.process / "cgroup").write_text("".join(f"{line}\n" for line in lines))

    def mounted(self, line: str, root: str = "/", mount: Path | None = None) -> None:
        point = str(mount or self.mount).replace(" ", "\\040")
        self.mounts.append(line.format(root=root, mount=point))
        (self.process / "mountinfo").write_text("".join(f"{mount}\n" for mount in self.mounts))

    def file(self, name: str, text: str) -> None:
        path = self.mount / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")

    @property
    def quota(self) -> float | None:
        return cpu_quota(self.process)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine without control groups yet."""
    return Machine(tmp_path)


def test_version_2_quota_of_a_container(machine: Machine) -> None:
    """In a container of its own namespace the group is the root of what is mounted."""
    machine.groups("0::/")
    machine.mounted(V2_MOUNT)
    machine.file("cpu.max", "150000 100000")
    assert machine.quota == 1.5


def test_version_1_quota_of_a_container(machine: Machine) -> None:
    """Docker with version 1 mounts the container's group, and /proc names it with its full path."""
    machine.groups("5:memory:/docker/c0ffee", "4:cpu,cpuacct:/docker/c0ffee", "0::/docker/c0ffee")
    machine.mounted(V1_MOUNT, root="/docker/c0ffee")
    machine.file("cpu.cfs_quota_us", "50000")
    machine.file("cpu.cfs_period_us", "100000")
    assert machine.quota == 0.5


@pytest.mark.parametrize(
    ("name", "unlimited"), [("cpu.max", "max 100000"), ("cpu.cfs_quota_us", "-1")]
)
def test_group_without_a_limit(machine: Machine, name: str, unlimited: str) -> None:
    """Version 2 says max, and version 1 says -1."""
    machine.groups("4:cpu,cpuacct:/", "0::/")
    machine.mounted(V1_MOUNT)
    machine.mounted(V2_MOUNT)
    machine.file(name, unlimited)
    machine.file("cpu.cfs_period_us", "100000")
    assert machine.quota is None


def test_least_quota_of_the_groups_around_counts(machine: Machine) -> None:
    """A pod limited to two CPUs limits its containers, whatever their own quota."""
    machine.groups("0::/pod/container/app")
    machine.mounted(V2_MOUNT)
    machine.file("pod/cpu.max", "200000 100000")
    machine.file("pod/container/cpu.max", "800000 100000")
    machine.file("pod/container/app/cpu.max", "max 100000")
    assert machine.quota == 2.0


def test_quota_of_another_group_does_not_count(machine: Machine) -> None:
    """Only the groups that the process is in."""
    machine.groups("0::/mine")
    machine.mounted(V2_MOUNT)
    machine.file("mine/cpu.max", "400000 100000")
    machine.file("other/cpu.max", "100000 100000")
    assert machine.quota == 4.0


@pytest.mark.parametrize("path", ["/elsewhere/app", "/../../app", "/docker/c0ffee42"])
def test_group_outside_of_the_mounted_part(machine: Machine, path: str) -> None:
    """Its own folder cannot be seen; the mount point's quota still holds."""
    machine.groups(f"0::{path}")
    machine.mounted(V2_MOUNT, root="/docker/c0ffee")
    machine.file("cpu.max", "300000 100000")
    assert machine.quota == 3.0


@pytest.mark.parametrize("text", ["", "many 100000", "100000", "100000 0"])
def test_unreadable_quota_is_none(machine: Machine, text: str) -> None:
    """A file that says something else is ignored."""
    machine.groups("0::/")
    machine.mounted(V2_MOUNT)
    machine.file("cpu.max", text)
    assert machine.quota is None


def test_system_without_control_groups(tmp_path: Path) -> None:
    """Where /proc has no such files there is no quota."""
    assert cpu_quota(tmp_path) is None


@pytest.mark.parametrize(
    ("quota", "expected"), [(None, 8), (16.0, 8), (2.0, 2), (1.5, 2), (0.1, 1)]
)
def test_quota_limits_the_cores(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, expected: int
) -> None:
    """Part of a CPU counts as a core; a quota above the affinity changes nothing."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(cores, "cpu_quota", lambda: quota)
    assert available_cores() == expected


def test_system_without_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an affinity the machine's cores count; without those, one."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(cores, "cpu_quota", lambda: None)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert available_cores() == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert available_cores() == 1
