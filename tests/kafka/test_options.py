"""Settings for a broker that asks for TLS or a login: read, sent to executors, and never shown."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from batchmill.errors import ConfigError
from batchmill.export import ExporterSettings
from batchmill.kafka import (
    KafkaLoginError,
    KafkaSettings,
    check_options,
    hide_secrets,
    read_options,
    with_certificates,
)

LOGIN = {
    "security.protocol": "sasl_ssl",
    "sasl.mechanisms": "SCRAM-SHA-512",
    "sasl.username": "mill",
    "sasl.password": 'a "b" \\c',
}
CERTIFICATE = "-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----\n"
KEY = "-----BEGIN PRIVATE KEY-----\nx\n-----END PRIVATE KEY-----\n"


def test_certificates_go_along_as_text(tmp_path: Path) -> None:
    """Executors on other machines do not have the files; a folder there may have others."""
    for name, text in (("ca", CERTIFICATE), ("own", CERTIFICATE), ("key", KEY)):
        (tmp_path / name).write_text(text)
    given = {
        "ssl.ca.location": str(tmp_path / "ca"),
        "ssl.certificate.location": str(tmp_path / "own"),
        "ssl.key.location": str(tmp_path / "key"),
        "ssl.key.password": "secret",
    }
    assert with_certificates(LOGIN | given) == {
        **LOGIN,
        "ssl.ca.pem": CERTIFICATE,
        "ssl.certificate.pem": CERTIFICATE,
        "ssl.key.pem": KEY,
        "ssl.key.password": "secret",
    }
    for kept in ("probe", str(tmp_path)):
        assert with_certificates({"ssl.ca.location": kept}) == {"ssl.ca.location": kept}
    with pytest.raises(ConfigError, match=r"ssl\.ca\.location.*\(No such file"):
        with_certificates({"ssl.ca.location": str(tmp_path / "none")})


def test_secrets_are_in_no_text() -> None:
    """Not in what settings show of themselves, and not in what librdkafka says."""
    for shown in (KafkaSettings(options=LOGIN), ExporterSettings(kafka_options=LOGIN)):
        assert "mill" not in repr(shown)
    said = f"the password {LOGIN['sasl.password']} of mill is bad"
    assert hide_secrets(said, LOGIN) == "the password (hidden) of mill is bad"


def test_a_file_is_checked_when_it_is_read(tmp_path: Path) -> None:
    """For what batchmill sets itself, and whether it is text."""
    file = tmp_path / "kafka.properties"
    file.write_text("sasl.username=me\nacks=0\n")
    with pytest.raises(ConfigError, match="acks"):
        read_options(file)
    file.write_bytes(b"sasl.username=\xff\n")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_options(file)
    check_options(LOGIN)


def test_the_error_of_a_login_survives_pickling() -> None:
    """With what it carries."""
    error = KafkaLoginError("kafka://one:9092/spans", "no")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), vars(again)) == (str(error), vars(error))
    assert "--kafka-config" in str(error)
    assert isinstance(error, PermissionError)
