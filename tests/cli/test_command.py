"""The ``batchmill`` command itself: its version, missing extras, and words it does not know."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import batchmill.extras
from batchmill.cli import main
from batchmill.extras import EXTRAS
from tests.kit.threads import PATIENCE_S

ROOT = Path(__file__).parents[2]
WITHOUT_RICH = """
import sys
sys.modules["rich"] = None
sys.argv = ["batchmill", "top"]
from batchmill.cli import main
sys.exit(main())
"""


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run this Python to its end with its output in pipes."""
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def test_version_is_the_package_s() -> None:
    """`batchmill --version` prints the version of the package."""
    assert python("-m", "batchmill", "--version").stdout == f"batchmill {batchmill.__version__}\n"


def test_missing_rich_is_named() -> None:
    """A command that draws with rich fails without it and says what to install: no traceback."""
    done = python("-c", WITHOUT_RICH)
    assert done.returncode == 1
    assert "pip install 'batchmill[cli]'" in done.stderr
    assert "Traceback" not in done.stderr


POSTGRES = "postgresql://nobody@127.0.0.1:1/none"


@pytest.mark.parametrize(
    ("words", "packages", "extras"),
    [
        (f"query calls --store {POSTGRES}", "rich psycopg", "cli,postgres"),
        (f"web --store {POSTGRES}", "starlette psycopg", "web,postgres"),
        (
            f"export --to remote+http://one/write --store {POSTGRES}",
            "pyarrow psycopg",
            "postgres,export",
        ),
        (f"alerts run --rules RULES --store {POSTGRES}", "yaml psycopg", "postgres,alerts"),
        ("ingest --to kafka://one:9092/spans", "h2 confluent_kafka", "otlp,kafka"),
        ("demo", "opentelemetry.sdk requests", "demo"),
    ],
)
def test_missing_extras_are_named_at_once(
    words: str,
    packages: str,
    extras: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Not the second one after the first was installed."""
    rules = tmp_path / "rules.yml"
    rules.write_text("rule: []")
    absent = packages.split()
    monkeypatch.setattr(batchmill.extras, "_is_installed", lambda package: package not in absent)
    monkeypatch.setattr(sys, "argv", ["batchmill", *words.replace("RULES", str(rules)).split()])
    assert main() == 1
    assert f"pip install 'batchmill[{extras}]'" in capsys.readouterr().err


def test_packages_of_the_extras_are_those_of_the_project() -> None:
    """The extras that commands check bring as many packages as pyproject.toml says."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    declared = project["optional-dependencies"]
    assert {name: len(EXTRAS[name]) for name in EXTRAS} == {
        name: len(declared[name]) for name in EXTRAS
    }


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["stauts"], "there is no command 'stauts'; did you mean status?"),
        (["q"], "there is no command 'q'; did you mean query?"),
        (["conf"], "there is no command 'conf'; did you mean config?"),
        (["config", "sho"], "there is no action 'sho'; did you mean show?"),
        (["oal", "chek"], "there is no action 'chek'; did you mean check?"),
        (["xyzzy"], "there is no command 'xyzzy' (choose from run, "),
        (["run", "--htpp-port=1"], "--htpp-port=1; did you mean --http-port?"),
        (["query", "m", "--stroe", "x"], "--stroe; did you mean --store?"),
        (["query", "m", "--grain", "hours"], "there is no value 'hours'; did you mean hour?"),
    ],
    ids=" ".join,
)
def test_word_that_is_not_known_gets_a_suggestion(
    words: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Commands, their actions and options, misspelt or abbreviated; the exit code is 2."""
    monkeypatch.setattr(sys, "argv", ["batchmill", *words])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


LOADED = """
import contextlib, io, sys
sys.argv = ["batchmill", "ingest", "--help"]
from batchmill.cli import main
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
    main()
print(*sorted(name for name in sys.modules if name.startswith("batchmill.")))
"""


def test_a_command_loads_its_own_modules_only() -> None:
    """What other commands need takes half a second, and a receiver needs none of it."""
    loaded = set(python("-c", LOADED).stdout.split())
    assert "batchmill.cli.ingest" in loaded
    others = ("cli.alerts", "cli.export", "cli.pipeline", "alerts", "store", "web", "spark")
    assert loaded.isdisjoint(f"batchmill.{name}" for name in others)


LEFT_OUT = """
import pyarrow
from batchmill.extras import left_out
with left_out("pandas"):
    assert pyarrow.array([1, None]).to_pylist() == [1, None]
    try:
        import pandas
    except ModuleNotFoundError as error:
        print(error)
assert pyarrow.table({"n": [1]}).to_pandas()["n"].tolist() == [1]
"""


def test_a_process_can_leave_a_package_out() -> None:
    """pyarrow takes pandas for missing, and works without it; not for ever."""
    assert python("-c", LEFT_OUT).stdout == "pandas is not used in this process\n"
