"""Files that are replaced whole, and locks on files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from batchmill.files import FileLock, create_whole, read_json, write_json, write_whole


def names_in(folder: Path) -> list[str]:
    """What lies in a folder."""
    return [path.name for path in folder.iterdir()]


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    """The new content takes the old one's place, readable by its owner, and no part is left."""
    path = tmp_path / "state.json"
    write_json(path, {"n": 1})
    write_json(path, {"n": 2}, durable=True)
    assert read_json(path) == {"n": 2}
    assert path.stat().st_mode & 0o777 == 0o600
    assert names_in(tmp_path) == ["state.json"]


def test_a_write_that_fails_leaves_the_old_content(tmp_path: Path) -> None:
    """And no temporary file."""
    target = tmp_path / "folder"
    target.mkdir()
    (target / "child").touch()  # a folder with content cannot be replaced by a file
    with pytest.raises(OSError, match="folder"):
        write_whole(target, b"new")
    assert names_in(tmp_path) == ["folder"]


def test_only_the_first_creates(tmp_path: Path) -> None:
    """The second one is answered False and changes nothing."""
    path = tmp_path / "id"
    assert create_whole(path, "first")
    assert not create_whole(path, "second")
    assert path.read_text() == "first"
    assert names_in(tmp_path) == ["id"]


@pytest.mark.parametrize("content", ["", "{", "[1]", "null"])
def test_what_is_no_json_object_reads_as_none(tmp_path: Path, content: str) -> None:
    """An empty, broken or other file is as good as none."""
    path = tmp_path / "state.json"
    path.write_text(content)
    assert read_json(path) is None
    assert read_json(tmp_path / "missing") is None


def test_a_lock_is_held_once(tmp_path: Path) -> None:
    """Also in one process; it can be taken again after its release."""
    path = tmp_path / "lock"
    assert not FileLock.is_taken(path)
    lock = FileLock.take(path)
    assert lock is not None
    assert FileLock.is_taken(path)
    assert FileLock.take(path) is None
    lock.release()
    assert not FileLock.is_taken(path)


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    """However that ends: here without a release."""
    path = tmp_path / "lock"
    code = (
        "import os, sys; from pathlib import Path; from batchmill.files import FileLock\n"
        "assert FileLock.take(Path(sys.argv[1])) is not None; os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == 9
    lock = FileLock.take(path)
    assert lock is not None
    lock.release()
