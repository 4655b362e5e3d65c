"""Translates librdkafka's settings to those of Kafka's Java client, which Spark reads with.

So one file with settings serves all clients of the broker. The two clients have the same features
under other names: certificates are PEM files for the one and text or a keystore for the other, a
login is two settings or a JAAS text. Files are read here, on the driver: executors on other
machines do not have them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from batchmill.errors import ConfigError
from batchmill.kafka.settings import check_options

_SECURITY = ("enable.sasl.", "enable.ssl.", "https.", "sasl.", "security.", "ssl.")
"""Settings with these prefixes must not be dropped: that could make a connection insecure."""
_SAME = (
    *("client.dns.lookup", "client.id", "client.rack", "connections.max.idle.ms"),
    *("metadata.max.age.ms", "reconnect.backoff.max.ms", "reconnect.backoff.ms"),
    *("retry.backoff.max.ms", "retry.backoff.ms"),
)
_PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
_LOGIN = {
    "PLAIN": "org.apache.kafka.common.security.plain.PlainLoginModule",
    "SCRAM-SHA-256": "org.apache.kafka.common.security.scram.ScramLoginModule",
    "SCRAM-SHA-512": "org.apache.kafka.common.security.scram.ScramLoginModule",
}
_NO_SUCH_SETTING = (
    "left out for a pipeline: Kafka's Java client, which Spark reads with, has no such setting"
)


class JavaOptions(NamedTuple):
    """Settings for Spark's Kafka source."""

    options: dict[str, str]
    """With the prefix ``kafka.``."""
    unused: tuple[str, ...]
    """Names of settings that matter to librdkafka only, and are left out."""


def java_options(options: Mapping[str, str]) -> JavaOptions:
    """The same connection for the Java client; raises ConfigError where it cannot make it.

    >>> java_options({"security.protocol": "ssl", "queued.min.messages": "1"}).options
    {'kafka.security.protocol': 'SSL'}
    """
    check_options(options)
    left = dict(options)
    java: dict[str, str] = {}
    protocol = left.pop("security.protocol", "plaintext").upper()
    if protocol not in _PROTOCOLS:
        raise _wrong("security.protocol", protocol, f"one of {', '.join(_PROTOCOLS).lower()}")
    if protocol != "PLAINTEXT":
        java["security.protocol"] = protocol
    _login(left, java, needed=protocol.startswith("SASL"))
    _trust(left, java)
    _identity(left, java)
    for name in _SAME:
        if name in left:
            java[name] = left.pop(name)
    for name in left:
        if name.startswith(_SECURITY):
            raise _wrong(name, "…", _NO_SUCH_SETTING)
    return JavaOptions({f"kafka.{name}": value for name, value in java.items()}, tuple(left))


def _login(left: dict[str, str], java: dict[str, str], *, needed: bool) -> None:
    name = "sasl.mechanism" if "sasl.mechanism" in left else "sasl.mechanisms"
    mechanism = left.pop(name, "GSSAPI").upper()
    left.pop("sasl.mechanisms", None)
    user, password = left.pop("sasl.username", None), left.pop("sasl.password", None)
    if not needed:
        return
    module = _LOGIN.get(mechanism)
    if module is None:
        raise _wrong(name, mechanism, f"one of {', '.join(_LOGIN)} for a pipeline")
    if user is None or password is None:
        missing = "sasl.username" if user is None else "sasl.password"
        raise _wrong(missing, None, f"given, since the mechanism is {mechanism}")
    java["sasl.mechanism"] = mechanism
    login = f"username={_quoted(user)} password={_quoted(password)}"
    java["sasl.jaas.config"] = f"{module} required {login};"


def _trust(left: dict[str, str], java: dict[str, str]) -> None:
    """Which certificates of brokers are trusted; by default those that the JVM trusts."""
    trusted = _pem(left, "ssl.ca")
    if trusted is not None:
        java |= {"ssl.truststore.type": "PEM", "ssl.truststore.certificates": trusted}
    verify = left.pop("enable.ssl.certificate.verification", "true").lower()
    if verify not in ("true", "1", "t"):
        raise _wrong(
            "enable.ssl.certificate.verification",
            verify,
            "true for a pipeline: Kafka's Java client always verifies certificates. Name the "
            "broker's own in ssl.ca.location",
        )
    algorithm = left.pop("ssl.endpoint.identification.algorithm", None)
    if algorithm is not None:
        java["ssl.endpoint.identification.algorithm"] = algorithm.replace("none", "")


def _identity(left: dict[str, str], java: dict[str, str]) -> None:
    """The client's own certificate and key."""
    chain, key = _pem(left, "ssl.certificate"), _pem(left, "ssl.key")
    if chain is not None and key is not None:
        java["ssl.keystore.type"] = "PEM"
        java["ssl.keystore.certificate.chain"] = chain
        java["ssl.keystore.key"] = _pkcs8(key)
    elif chain is not None or key is not None:
        missing = "ssl.key.location" if key is None else "ssl.certificate.location"
        raise _wrong(missing, None, "given: a certificate is of no use without its key")
    if "ssl.keystore.location" in left:
        java["ssl.keystore.type"] = "PKCS12"
        for name in ("ssl.keystore.location", "ssl.keystore.password"):
            if name in left:
                java[name] = left.pop(name)
    if "ssl.key.password" in left:
        java["ssl.key.password"] = left.pop("ssl.key.password")


def _pem(left: dict[str, str], what: str) -> str | None:
    """A PEM text, given as such or as the name of a file."""
    text, path = left.pop(f"{what}.pem", None), left.pop(f"{what}.location", None)
    if text is not None or path is None:
        return text
    try:
        return Path(path).read_text("ascii")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise _wrong(f"{what}.location", path, f"a file in PEM that can be read ({why})") from None


def _pkcs8(key: str) -> str:
    if "BEGIN PRIVATE KEY" in key or "BEGIN ENCRYPTED PRIVATE KEY" in key:
        return key
    raise _wrong(
        "ssl.key.location",
        "…",
        "a key in PKCS#8 for a pipeline: openssl pkcs8 -topk8 -in KEY -out NEW makes one",
    )


def _quoted(text: str) -> str:
    """A text quoted for JAAS: a backslash before what would end it."""
    for plain, escaped in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"), ("\r", "\\r")):
        text = text.replace(plain, escaped)
    return f'"{text}"'


def _wrong(name: str, value: str | None, allowed: str) -> ConfigError:
    return ConfigError(f"options[{name!r}]", value, allowed)
