"""What `batchmill run` checks of its pipeline, before it starts a process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from batchmill import ConfigError
from batchmill.cli.options import SourcesError
from batchmill.cli.run import check_run
from batchmill.oal import OalErrors
from batchmill.run import RunSettings, resolve
from tests.kit.threads import PATIENCE_S

pytest.importorskip("pyspark")


def settings(**given: Any) -> RunSettings:
    """The settings of a run, those given and the defaults."""
    return resolve(given, "batchmill.toml", {}, {})


def test_script_that_is_missing_is_refused(tmp_path: Path) -> None:
    """It is no reason to start Spark."""
    with pytest.raises(OalErrors, match=r"none\.oal"):
        check_run(settings(oal=[str(tmp_path / "none.oal")]), demo=False)


def test_script_with_an_error_is_refused(tmp_path: Path) -> None:
    """With its line, as `batchmill oal check` has it."""
    script = tmp_path / "my.oal"
    script.write_text("a = from(Service.latency).longAvg();\nb = from(Servic.latency).longAvg();")
    with pytest.raises(OalErrors, match=r"my\.oal:2"):
        check_run(settings(oal=[str(script)]), demo=False)


def test_script_without_a_metric_is_refused(tmp_path: Path) -> None:
    """As the pipeline would."""
    script = tmp_path / "my.oal"
    script.write_text("// nothing yet\n")
    with pytest.raises(ConfigError, match="at least one metric"):
        check_run(settings(oal=[str(script)]), demo=False)


def test_module_of_event_types_that_is_missing_is_refused() -> None:
    """Scripts may need it."""
    with pytest.raises(SourcesError, match="there_is_no_such_module"):
        check_run(settings(sources=["there_is_no_such_module"]), demo=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"conf": ["spark"]}, "--conf: 'spark'"), ({"dedup": "1000h"}, "--dedup: '1000h'")],
)
def test_value_that_the_pipeline_refuses_is_refused(
    changes: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the pipeline's own rules."""
    with pytest.raises(SystemExit) as caught:
        check_run(settings(**changes), demo=False)
    assert caught.value.code == 2
    assert f"batchmill run: error: argument {message} is not valid" in capsys.readouterr().err


def test_default_settings_pass() -> None:
    """Nothing is refused that runs."""
    check_run(settings(), demo=True)


def test_nothing_is_made_where_a_script_is_missing(tmp_path: Path) -> None:
    """Not even the home folder."""
    command = [sys.executable, "-m", "batchmill", "run", "--home=home", "--oal=none.oal"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "none.oal" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
