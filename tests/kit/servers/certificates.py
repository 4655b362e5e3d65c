"""Certificates for tests, made with openssl."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest

from batchmill.http import Access
from tests.kit.threads import WAIT_S, until


def write_certificate(folder: Path) -> Access:
    """A new certificate for 127.0.0.1, signed by itself, over the one that is there, if any."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make certificates with")
    made = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout new.key"
    more = "-out new.pem -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    subprocess.run(
        ["openssl", *made.split(), *more.split()], cwd=folder, check=True, capture_output=True
    )
    access = Access(tls_cert=folder / "cert.pem", tls_key=folder / "key.pem")
    assert access.tls_cert is not None
    assert access.tls_key is not None
    (folder / "new.key").replace(access.tls_key)
    (folder / "new.pem").replace(access.tls_cert)
    return access


def write_authority(folder: Path) -> None:
    """``ca.pem``, and certificates of it for 127.0.0.1: ``server.pem`` and ``client.pem``.

    ``stranger.pem`` is of nobody; each has its ``.key``.
    """
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make certificates with")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    for name in ("ca", "stranger"):
        openssl("req", "-x509", *new, "-keyout", f"{name}.key", "-out", f"{name}.pem",
                "-subj", f"/CN={name}")  # fmt: skip
    for name in ("server", "client"):
        openssl("req", "-x509", "-CA", "ca.pem", "-CAkey", "ca.key", *new,
                "-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}",
                "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost",
                "-addext", "basicConstraints=critical,CA:FALSE")  # fmt: skip


def client_of(folder: Path, name: str | None) -> ssl.SSLContext:
    """A client with a certificate of :func:`write_authority`, or none; it trusts ``ca.pem``."""
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    if name is not None:
        context.load_cert_chain(folder / f"{name}.pem", folder / f"{name}.key")
    return context


def read_trusting(url: str, access: Access) -> bytes:
    """The page at ``url``, by a client that trusts this certificate and no other."""
    trusted = ssl.create_default_context(cafile=str(access.tls_cert))
    with urlopen(url, timeout=WAIT_S, context=trusted) as response:
        content: bytes = response.read()
    return content


def check_replaced_without_restart(url: str, folder: Path) -> None:
    """New connections to a server get a certificate that is written over its old one."""
    parts = urlsplit(url)
    place = str(parts.hostname), int(parts.port or 443)
    old = ssl.get_server_certificate(place)
    access = write_certificate(folder)
    assert access.tls_cert is not None
    wanted = access.tls_cert.read_text()
    assert old != wanted
    until(lambda: ssl.get_server_certificate(place) == wanted, f"{url} has the new certificate")
    assert read_trusting(url, access)
