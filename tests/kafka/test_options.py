"""Settings for a broker that asks for TLS or a login: read, turned for Java, and never shown."""

from __future__ import annotations

import pickle
import subprocess
from pathlib import Path

import pytest

from batchmill.errors import ConfigError
from batchmill.export import ExporterSettings
from batchmill.kafka import (
    KafkaLoginError,
    KafkaSettings,
    check_options,
    hide_secrets,
    java_options,
    read_options,
)

LOGIN = {
    "security.protocol": "sasl_ssl",
    "sasl.mechanisms": "SCRAM-SHA-512",
    "sasl.username": "mill",
    "sasl.password": 'a "b" \\c',
}
CERTIFICATE = "-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----\n"
KEY = "-----BEGIN PRIVATE KEY-----\nx\n-----END PRIVATE KEY-----\n"


def test_a_login_becomes_a_text_of_jaas() -> None:
    """Whatever is in the password; names and words in the Java client's way."""
    assert java_options(LOGIN).options == {
        "kafka.security.protocol": "SASL_SSL",
        "kafka.sasl.mechanism": "SCRAM-SHA-512",
        "kafka.sasl.jaas.config": "org.apache.kafka.common.security.scram.ScramLoginModule "
        'required username="mill" password="a \\"b\\" \\\\c";',
    }


def test_certificates_go_along_as_text(tmp_path: Path) -> None:
    """Executors on other machines do not have the files."""
    for name, text in (("ca", CERTIFICATE), ("own", CERTIFICATE), ("key", KEY)):
        (tmp_path / name).write_text(text)
    given = {
        "security.protocol": "SSL",
        "ssl.ca.location": str(tmp_path / "ca"),
        "ssl.certificate.location": str(tmp_path / "own"),
        "ssl.key.location": str(tmp_path / "key"),
        "ssl.key.password": "secret",
        "ssl.endpoint.identification.algorithm": "none",
    }
    assert java_options(given).options == {
        "kafka.security.protocol": "SSL",
        "kafka.ssl.truststore.type": "PEM",
        "kafka.ssl.truststore.certificates": CERTIFICATE,
        "kafka.ssl.endpoint.identification.algorithm": "",
        "kafka.ssl.keystore.type": "PEM",
        "kafka.ssl.keystore.certificate.chain": CERTIFICATE,
        "kafka.ssl.keystore.key": KEY,
        "kafka.ssl.key.password": "secret",
    }


def test_options_of_both_clients_are_kept_and_others_reported() -> None:
    """A setting that only tunes librdkafka says nothing about the connection."""
    java = java_options({"client.id": "me", "queued.min.messages": "7", "sasl.username": "x"})
    assert java.options == {"kafka.client.id": "me"}
    assert java.unused == ("queued.min.messages",)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"security.protocol": "tls"}, "one of plaintext, ssl"),
        ({"sasl.mechanisms": "OAUTHBEARER"}, "one of PLAIN, SCRAM-SHA-256, SCRAM-SHA-512"),
        ({"sasl.mechanisms": "GSSAPI"}, "one of PLAIN"),
        ({"enable.ssl.certificate.verification": "false"}, "always verifies certificates"),
        ({"ssl.ca.location": "/nowhere/ca.pem"}, "a file in PEM that can be read (No such file"),
        ({"ssl.certificate.pem": CERTIFICATE}, "no use without its key"),
        (
            {"ssl.certificate.pem": CERTIFICATE, "ssl.key.pem": KEY.replace("PRIV", "RSA PRIV")},
            "openssl pkcs8 -topk8",
        ),
        ({"ssl.cipher.suites": "x"}, "has no such setting"),
        ({"sasl.oauthbearer.client.secret": "secret"}, "has no such setting"),
        ({"group.id": "mine"}, "batchmill sets it itself"),
    ],
)
def test_what_cannot_be_turned_is_refused(changes: dict[str, str], message: str) -> None:
    """By its name, with what to do, and without what it says if that is a secret."""
    with pytest.raises(ConfigError) as caught:
        java_options(LOGIN | changes)
    assert message in str(caught.value)
    assert next(iter(changes)).partition(".")[0] in caught.value.field
    assert LOGIN["sasl.password"] not in str(caught.value)


def test_a_login_without_a_user_is_refused() -> None:
    """The Java client would say something else, and later."""
    with pytest.raises(ConfigError, match=r"sasl\.username"):
        java_options({"security.protocol": "sasl_ssl", "sasl.mechanism": "PLAIN"})


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


def test_the_key_that_is_advised_is_taken(tmp_path: Path) -> None:
    """What the error says to run makes a key that goes."""
    key = tmp_path / "key.pem"
    made = ["openssl", "genrsa", "-traditional", "-out", str(key), "2048"]
    try:
        subprocess.run(made, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no openssl that makes such keys")
    given = {"ssl.certificate.pem": CERTIFICATE, "ssl.key.location": str(key)}
    with pytest.raises(ConfigError, match="PKCS#8"):
        java_options(given)
    new = tmp_path / "new.pem"
    turned = ["openssl", "pkcs8", "-topk8", "-nocrypt", "-in", str(key), "-out", str(new)]
    subprocess.run(turned, check=True, capture_output=True)
    assert java_options(given | {"ssl.key.location": str(new)}).options["kafka.ssl.keystore.key"]
