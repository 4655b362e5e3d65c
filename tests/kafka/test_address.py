"""Addresses of topics, settings, and what is said where the extra is missing: no broker here."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from batchmill import ConfigError
from batchmill.kafka import (
    KafkaAddress,
    KafkaAddressError,
    KafkaSettings,
    KafkaTopicError,
    KafkaWriteError,
    MessageTooLargeError,
    read_options,
)
from tests.kit.threads import PATIENCE_S


def test_an_address_names_brokers_and_a_topic() -> None:
    """Several brokers have commas between them; IPv6 has brackets."""
    address = KafkaAddress.parse("kafka://one:9092,[::1]:19092/spans.of-all_1")
    assert address.brokers == ("one:9092", "[::1]:19092")
    assert address.bootstrap == "one:9092,[::1]:19092"
    assert address.topic == "spans.of-all_1"


def test_an_address_reads_as_it_was_written() -> None:
    """Its text is the address again."""
    text = "kafka://one:9092,two:9093/spans"
    assert str(KafkaAddress.parse(text)) == text


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("one:9092/spans", "does not begin with kafka://"),
        ("http://one:9092/spans", "does not begin with kafka://"),
        ("kafka://one/spans", "'one' is not host:port"),
        ("kafka://one:nine/spans", "'one:nine' is not host:port"),
        ("kafka://one:0/spans", "'one:0' is not host:port"),
        ("kafka://one:65536/spans", "'one:65536' is not host:port"),
        ("kafka://:9092/spans", "':9092' is not host:port"),
        ("kafka://one:9092,/spans", "'' is not host:port"),
        ("kafka://::1:9092/spans", "'::1:9092' is not host:port"),
        ("kafka:///spans", "'' is not host:port"),
        ("kafka://one:9092", "names no topic"),
        ("kafka://one:9092/", "names no topic"),
        ("kafka://one:9092/a/b", "the topic 'a/b' is not"),
        ("kafka://one:9092/..", "the topic '..' is not"),
        ("kafka://one:9092/" + "x" * 250, "the topic 'xxx"),
        ("kafka://one:9092/spans?acks=0", "the topic 'spans?acks=0' is not"),
    ],
)
def test_what_is_wrong_with_an_address_is_said(address: str, why: str) -> None:
    """The error names the part, and shows how an address looks."""
    with pytest.raises(KafkaAddressError) as caught:
        KafkaAddress.parse(address)
    assert why in str(caught.value)
    assert "kafka://host:port/topic" in str(caught.value)


def test_a_password_in_an_address_is_not_repeated() -> None:
    """It has no place there, and none in a log either."""
    with pytest.raises(KafkaAddressError) as caught:
        KafkaAddress.parse("kafka://me:secret@one:9092/spans")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"capacity_rows": 0}, "capacity_rows"),
        ({"max_message_bytes": 10}, "max_message_bytes"),
        ({"compression": "rar"}, "compression"),
        ({"delivery_timeout_s": 0}, "delivery_timeout_s"),
        ({"linger_s": 9.0}, "linger_s"),
        ({"options": {"acks": "0"}}, "options['acks']"),
        ({"options": {"enable.idempotence": "false"}}, "options['enable.idempotence']"),
    ],
)
def test_settings_check_themselves(changes: dict[str, object], field: str) -> None:
    """What the guarantees rest on cannot be set at all."""
    with pytest.raises(ConfigError) as caught:
        KafkaSettings(**changes)  # type: ignore[arg-type]
    assert caught.value.field == field


def test_options_are_read_from_a_file(tmp_path: Path) -> None:
    """A setting a line; remarks and empty lines do not count, and a value may have an = in it."""
    file = tmp_path / "kafka.properties"
    file.write_text("# TLS\nsecurity.protocol=SSL\n\n sasl.password = a=b\n")
    assert read_options(file) == {"security.protocol": "SSL", "sasl.password": "a=b"}


def test_a_line_that_is_no_option_is_not_repeated(tmp_path: Path) -> None:
    """It may be a password that lost its name: only its number is told."""
    file = tmp_path / "kafka.properties"
    file.write_text("security.protocol=SSL\nsecret\n")
    with pytest.raises(ConfigError, match="line 2") as caught:
        read_options(file)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        KafkaAddressError("kafka://", "it names no topic"),
        KafkaWriteError("kafka://one:9092/spans", "_MSG_TIMED_OUT", "timed out"),
        KafkaTopicError("kafka://one:9092/spans"),
        MessageTooLargeError(2_000_000, 1_000_000, "spans"),
    ],
)
def test_errors_survive_pickling(error: Exception) -> None:
    """With what they carry."""
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


_WITHOUT = """
import sys
sys.modules[{module!r}] = None
sys.argv = ["batchmill", "ingest", "--home", {home!r}, "--to", "kafka://127.0.0.1:9/spans"]
from batchmill.cli import main
sys.exit(main())
"""


def test_a_missing_extra_is_named(tmp_path: Path) -> None:
    """``batchmill ingest --to`` says what to install."""
    pytest.importorskip("uvicorn")
    code = _WITHOUT.format(module="confluent_kafka", home=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 1
    assert "pip install 'batchmill[kafka]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_malformed_address_ends_the_command(tmp_path: Path) -> None:
    """Before anything is opened or listens."""
    pytest.importorskip("uvicorn")
    command = [sys.executable, "-m", "batchmill", "ingest", "--home", str(tmp_path)]
    done = subprocess.run(
        [*command, "--to", "kafka://one:9092"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 1
    assert "names no topic" in done.stderr
    assert list(tmp_path.iterdir()) == []
