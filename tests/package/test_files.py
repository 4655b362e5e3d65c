"""Files that are replaced whole, and locks on files."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from batchmill import files
from batchmill.files import (
    FileLock,
    copy_whole,
    create_whole,
    own_folder,
    read_json,
    remove_free_locks,
    remove_stale_temporaries,
    write_json,
    write_whole,
)


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


def test_a_copy_is_whole_or_not_there(tmp_path: Path) -> None:
    """One that fails leaves no part of it."""
    source = tmp_path / "source"
    with pytest.raises(FileNotFoundError):
        copy_whole(source, tmp_path / "target")
    assert names_in(tmp_path) == []
    source.write_bytes(b"rows")
    copy_whole(source, tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == b"rows"
    assert sorted(names_in(tmp_path)) == ["source", "target"]


def test_only_the_first_creates(tmp_path: Path) -> None:
    """The second one is answered False and changes nothing."""
    path = tmp_path / "id"
    assert create_whole(path, "first")
    assert not create_whole(path, "second")
    assert path.read_text() == "first"
    assert names_in(tmp_path) == ["id"]


def test_what_killed_writers_have_left_is_removed(tmp_path: Path) -> None:
    """Once it is so old that nobody is about to rename it; other files stay."""
    for name, age_s in ((".a.json.1f.tmp", 90), (".b.json.2e.tmp", 0), ("c.tmp", 90)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (time.time() - age_s, time.time() - age_s))
    remove_stale_temporaries(tmp_path)
    assert sorted(names_in(tmp_path)) == [".b.json.2e.tmp", "c.tmp"]
    remove_stale_temporaries(tmp_path / "missing")


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


def test_locks_that_nobody_holds_are_removed(tmp_path: Path) -> None:
    """Other files stay, and so does what is held."""
    for name in ("a.lock", "b.lock", "c.txt"):
        (tmp_path / name).touch()
    held = FileLock.take(tmp_path / "a.lock")
    assert held is not None
    remove_free_locks(tmp_path, "*.lock")
    assert sorted(names_in(tmp_path)) == ["a.lock", "c.txt"]
    held.release()
    remove_free_locks(tmp_path, "*.lock")
    assert names_in(tmp_path) == ["c.txt"]


def test_a_lock_that_is_removed_as_it_is_taken_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is taken is the file that others see."""
    path = tmp_path / "lock"
    real, removed = files.try_lock, [False]

    def try_lock(handle: int, *, shared: bool = False) -> bool:
        if not removed[0]:
            removed[0] = True
            path.unlink()
        return real(handle, shared=shared)

    monkeypatch.setattr(files, "try_lock", try_lock)
    lock = FileLock.take(path)
    assert lock is not None
    assert FileLock.is_taken(path)
    assert FileLock.take(path) is None
    lock.release()


def test_folders_of_processes_that_have_ended_are_removed(tmp_path: Path) -> None:
    """However they ended; those of running processes, and what others have there, stay."""
    code = (
        "import os, sys; from pathlib import Path; from batchmill.files import own_folder\n"
        "(own_folder(Path(sys.argv[1])) / 'left').mkdir(); os._exit(9)"
    )
    (tmp_path / "batchmill-notes").mkdir()
    mine = own_folder(tmp_path)
    (mine / "work").write_text("")
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 9
    assert len(names_in(tmp_path)) == 5
    other = own_folder(tmp_path)
    assert sorted(names_in(tmp_path)) == sorted(
        ["batchmill-notes", mine.name, f"{mine.name}.lock", other.name, f"{other.name}.lock"]
    )
    assert names_in(mine) == ["work"]
