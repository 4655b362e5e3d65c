"""``batchmill run`` with a topic instead of the spool: a whole run, with Spark and a broker."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from batchmill.files import read_json
from batchmill.run import Home, read_counted
from tests.kit.jvm import java_missing, jvm_options
from tests.kit.pipelines import QUICK_SPARK
from tests.kit.processes import Life, running_pid, wait_for_json
from tests.kit.servers.kafka import PASSWORD, Broker
from tests.kit.threads import until
from tests.run.test_home import check_home


@pytest.mark.timeout(600)
@pytest.mark.skipif(java_missing() is not None, reason=java_missing() or "")
def test_the_demo_balances_over_a_topic(kafka: Broker, tmp_path: Path) -> None:
    """All processes are the real ones, and ingest is killed once; the broker asks for a login.

    It comes after they have started: they say that they wait, and go on by themselves.
    """
    for needed in ("grpc", "opentelemetry.exporter.otlp.proto.http", "pyspark", "uvicorn"):
        pytest.importorskip(needed)
    home = Home(tmp_path / "home")
    topic = kafka.new_topic(partitions=2)
    kafka.stop()
    command = [sys.executable, "-m", "batchmill", "run", "--demo=5", f"--home={home.folder}"]
    command += ["--http-port=0", "--grpc-port=0", "--master=local[2]", "--trigger=0.5"]
    command += [f"--kafka=kafka://{kafka.login}/{topic}"]
    command += [f"--kafka-config={kafka.login_file(tmp_path)}"]
    command += [f"--conf={name}={value}" for name, value in QUICK_SPARK.items()]
    environment = {**os.environ, "SPARK_SUBMIT_OPTS": jvm_options()}
    with Life(command, tmp_path / "errors", environment) as life:
        life.must_hear("OpenTelemetry: http://127.0.0.1:.*")
        said = home.log / "pipeline.log"
        waits = "when the broker is there"
        until(lambda: said.exists() and waits in said.read_text(), waits, 300)
        kafka.start()
        wait_for_json(home.ingest, "acknowledged_spans", timeout_s=300)
        os.kill(running_pid(home.supervisor, "ingest"), signal.SIGKILL)
        life.must_hear(r"ingest died \(SIGKILL\): starting it again in 0.5 s")
        life.must_hear("the demo's traffic is over: .*")
        life.end(0)
    spans = read_counted(home.store_url).spans
    (account,) = [line for line in life.lines if line.startswith("balance: ")]
    assert account.startswith(f"balance: {spans:,} spans sent = {spans:,} acknowledged = {spans:,}")
    assert spans > 0
    assert any("| topic " in line and " messages |" in line for line in life.lines)
    assert not list(home.spool.iterdir())
    content = read_json(home.progress) or {}
    assert (content["unread_segments"], content["source"]) == (0, f"kafka://{kafka.login}/{topic}")
    check_home(home.folder)
    files = [path for path in home.folder.rglob("*") if path.is_file()]
    assert not [file for file in files if PASSWORD.encode() in file.read_bytes()]
