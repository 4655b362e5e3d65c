"""A real broker that asks for a user and a password: all who talk to Kafka, let in and not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("confluent_kafka")
pytest.importorskip("uvicorn")

from batchmill.export import KafkaForwarder, Target
from batchmill.kafka import KafkaAddress, KafkaLoginError, check_readable
from tests.kafka.kit import rows_in
from tests.kit.ingest import PROTOBUF, ingest, request
from tests.kit.servers.kafka import Broker
from tests.kit.threads import PATIENCE_S, until

WRONG = "wr0ng-password"


def test_ingest_and_who_it_hands_on_to_log_in(kafka: Broker, tmp_path: Path) -> None:
    """One file says how: spans are acknowledged, and the traces are in their topic, too."""
    spans, traces = kafka.new_topic(), kafka.new_topic()
    with ingest(
        tmp_path,
        *("--to", f"kafka://{kafka.login}/{spans}"),
        *("--export-traces", f"kafka://{kafka.login}/{traces}"),
        *("--kafka-config", str(kafka.login_file(tmp_path))),
    ) as running:
        assert running.post(request(1, 2)).status == 200
        until(lambda: running.status()["forwarded"]["traces"]["sent"] == 2)
    assert len(rows_in(kafka.read(spans))) == 2
    assert len(kafka.read(traces)) == 1


def test_a_wrong_password_ends_ingest(kafka: Broker, tmp_path: Path) -> None:
    """With what to do; what was given is not repeated."""
    command = [sys.executable, "-m", "batchmill", "ingest", "--home", str(tmp_path)]
    file = kafka.login_file(tmp_path, WRONG)
    done = subprocess.run(
        [*command, "--to", f"kafka://{kafka.login}/{kafka.new_topic()}", f"--kafka-config={file}"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 1
    assert "refuses the login" in done.stderr
    assert "correct the user, the password" in done.stderr
    assert WRONG not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_a_wrong_password_does_not_read(kafka: Broker) -> None:
    """It is told as such, not as a broker that does not answer."""
    topic = kafka.new_topic()
    address = KafkaAddress.parse(f"kafka://{kafka.login}/{topic}")
    check_readable(address, kafka.login_options())
    with pytest.raises(KafkaLoginError) as caught:
        check_readable(address, kafka.login_options(WRONG))
    assert WRONG not in str(caught.value)


def test_what_a_wrong_password_keeps_from_being_handed_on_is_counted(kafka: Broker) -> None:
    """By that reason, not as time that was up."""
    target = Target.parse(f"kafka://{kafka.login}/{kafka.new_topic()}")
    forwarder = KafkaForwarder(target, options=kafka.login_options(WRONG), timeout_s=5.0)
    forwarder.offer(request(1, 2), PROTOBUF, 2)
    until(lambda: forwarder.stats()["dropped"] == {"AUTHENTICATION": 2})
    forwarder.close()
