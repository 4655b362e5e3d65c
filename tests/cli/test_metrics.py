"""--metrics-port: a page with the queues of a pipeline's or an exporter's process."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from batchmill import ConfigError
from batchmill.cli import _parser, options
from batchmill.cli.options import metrics_page
from batchmill.process_stats import ProcessStats
from tests.kit.queues import make_queue
from tests.kit.servers.prometheus import parsed
from tests.kit.threads import WAIT_S, until


@pytest.mark.parametrize("command", [["pipeline"], ["export", "--to=kafka://a:1/t"]])
def test_the_queues_of_the_process_are_served(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """To those who have the token of the file; the command prints where."""
    (tmp_path / "token").write_text("s3cret\n")
    options = ["--metrics-port=0", f"--metrics-token-file={tmp_path / 'token'}"]
    given = _parser().parse_args([*command, *options])
    with metrics_page(given), make_queue("inside", consumer=lambda batch: None):
        address = re.findall(r"http://\S+", capsys.readouterr().out)[0]
        request = Request(address, headers={"Authorization": "Bearer s3cret"})
        with urlopen(request, timeout=WAIT_S) as response:
            series = parsed(response.read().decode())
        with pytest.raises(HTTPError) as refused:
            urlopen(address, timeout=WAIT_S)
        refused.value.close()
    assert series["batchmill_queue_depth", frozenset({("queue", "inside")})] == 0
    assert refused.value.code == 401


def test_without_the_option_there_is_no_page(capsys: pytest.CaptureFixture[str]) -> None:
    """And nothing is printed."""
    with metrics_page(_parser().parse_args(["pipeline"])):
        assert capsys.readouterr() == ("", "")


def test_a_port_in_use_does_not_end_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says so once, and which option sets another one; then the page comes by itself."""
    monkeypatch.setattr(options, "_PAGE_AGAIN_S", 0.001)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        given = _parser().parse_args(["pipeline", f"--metrics-port={port}"])
        page = metrics_page(given)
        page.__enter__()
        fault = ProcessStats().report()["page_fault"]
        assert str(port) in fault
    try:
        until(lambda: "page_fault" not in ProcessStats().report())
    finally:
        page.__exit__(None, None, None)
    said = capsys.readouterr()
    assert said.err == f"{fault}\n"
    assert f":{port}/metrics" in said.out
    assert "--metrics-port" in fault


def test_a_port_that_stays_in_use_does_not_keep_the_command_from_ending() -> None:
    """It ends at once, and leaves no fault behind."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        given = _parser().parse_args(["pipeline", f"--metrics-port={taken.getsockname()[1]}"])
        with metrics_page(given):
            assert "page_fault" in ProcessStats().report()
    assert "page_fault" not in ProcessStats().report()


def test_a_page_for_all_needs_a_token_or_a_decision() -> None:
    """As every server that listens beyond this machine."""
    options = ["pipeline", "--metrics-port=0", "--metrics-bind=0.0.0.0"]
    with pytest.raises(ConfigError), metrics_page(_parser().parse_args(options)):
        pass
    with metrics_page(_parser().parse_args([*options, "--metrics-insecure"])):
        pass
