"""Files in tests: where the repository is, disks that are really full, no file left to open."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_TRIES = 100


@contextlib.contextmanager
def small_disk(folder: Path, kibibytes: int = 1024) -> Iterator[Path]:
    """``folder`` as a disk of that size; skips the test where none can be mounted."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = shutil.which("mount")
    if mount is None:
        pytest.skip("there is no mount(8) to make a small disk with")
    made = subprocess.run(
        [mount, "-t", "tmpfs", "-o", f"size={kibibytes}k", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        pytest.skip(f"no small disk can be mounted here: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path, leave: int = 0) -> Path:
    """Use up a disk but for some bytes; the file that does, to be removed again."""
    file = folder / "filler"
    with file.open("wb", buffering=0) as stream, contextlib.suppress(OSError):
        while True:
            stream.write(b"\0" * 4096)
    with file.open("r+b") as stream:
        stream.truncate(max(0, file.stat().st_size - leave))
    return file


def resize(folder: Path, kibibytes: int) -> None:
    """Another size for a small disk."""
    command = ["mount", "-o", f"remount,size={kibibytes}k", str(folder)]
    subprocess.run(command, check=True, capture_output=True)


def leave_no_room(folder: Path) -> None:
    """Make a small disk as small as what is on it, though others write to it."""
    for _ in range(_TRIES):
        used = shutil.disk_usage(folder).used
        # What is on it may have grown meanwhile, and a disk cannot be smaller than that.
        with contextlib.suppress(subprocess.CalledProcessError):
            resize(folder, max(1, used // 1024))
            return
    raise RuntimeError(f"{folder} grows faster than it can be made full")


@contextlib.contextmanager
def no_more_files() -> Iterator[Callable[[], None]]:
    """Every file that this process may open is open; yields what closes them again."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.open(os.devnull, os.O_RDONLY)]

    def close() -> None:
        while held:
            os.close(held.pop())

    resource.setrlimit(resource.RLIMIT_NOFILE, (held[0] + 8, before[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        yield close
    finally:
        close()
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
