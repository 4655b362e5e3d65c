"""The settings that all servers share: where they listen, and whom they serve."""

from __future__ import annotations

import hmac
import ipaddress
import socket
import ssl
from dataclasses import dataclass, field, fields
from pathlib import Path

from batchmill.errors import ConfigError


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server on ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name may resolve to any address


@dataclass(frozen=True, kw_only=True)
class Access:
    """What clients need to be served.

    A bearer ``token`` if one is set, a certificate signed by ``client_ca`` if that is set; both, if
    both are. ``tls_cert`` and ``tls_key`` encrypt connections.
    """

    token: str | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    client_ca: Path | None = None

    def __post_init__(self) -> None:
        token = self.token
        if token is not None and not (
            token and token.isascii() and token.isprintable() and " " not in token
        ):
            raise ConfigError("token", "…", "printable ASCII without spaces, and not empty")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError(
                "tls_key", self.tls_key and str(self.tls_key), "given together with tls_cert"
            )
        if self.client_ca is not None and self.tls_cert is None:
            raise ConfigError(
                "client_ca", str(self.client_ca), "given together with tls_cert and tls_key"
            )

    @property
    def tls(self) -> bool:
        """Whether connections are encrypted."""
        return self.tls_cert is not None

    def check_bind(self, host: str, insecure: bool) -> None:
        """Raise if other machines could use a server on ``host`` without authentication."""
        if self.token is None and self.client_ca is None and not insecure and not is_loopback(host):
            raise ConfigError(
                "bind",
                host,
                "a loopback address such as 127.0.0.1, unless clients need a token (--token) or "
                "a certificate (--tls-client-ca), or --insecure allows everybody",
            )

    def allows(self, authorization: str | bytes | None) -> bool:
        """Check the value of the header ``authorization``, in constant time for a wrong token."""
        if self.token is None:
            return True
        if authorization is None:
            return False
        header = authorization.encode() if isinstance(authorization, str) else authorization
        scheme, _, token = header.strip().partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(
            token.strip(), self.token.encode()
        )

    def ssl_context(self) -> ssl.SSLContext | None:
        """TLS; None without a certificate."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.tls_cert, self.tls_key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                "tls_cert", str(self.tls_cert), f"a certificate with its key, in PEM ({error})"
            ) from error
        if self.client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            try:
                context.load_verify_locations(self.client_ca)
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(
                    "client_ca", str(self.client_ca), f"certificates in PEM ({error})"
                ) from error
        return context


_BACKLOG = 512


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Where a server listens, whom it serves, and how many clients at a time.

    Subclasses add their ports (``port``, or named ``..._port``) and limits; a limit is a field
    named ``max_...`` or ``..._s``, and must be above 0.
    """

    bind: str = "127.0.0.1"
    access: Access = field(default_factory=Access)
    insecure: bool = False
    """Listen beyond this machine without authenticating clients."""
    max_connections: int = 500
    """Open at a time; one more is answered 503, unless it can have the place of a client that has
    not authenticated."""
    header_s: float = 5.0
    """Within which the headers of a request arrive, and a client authenticates."""
    request_s: float = 30.0
    """From a request's first byte to its last. The connection of a slower client is closed."""

    def __post_init__(self) -> None:
        for setting in fields(self):
            name, value = setting.name, getattr(self, setting.name)
            if name == "port" or name.endswith("_port"):
                if not 0 <= value <= 65535:
                    raise ConfigError(name, value, "a port, 0 to 65535")
            elif (name.startswith("max_") or name.endswith("_s")) and not 0 < value < float("inf"):
                raise ConfigError(name, value, "above 0")
        self.access.check_bind(self.bind, self.insecure)


def listen(bind: str, port: int, setting: str) -> socket.socket:
    """Open a port; where it is in use, the error names the ``setting`` that chose it."""
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((bind, port))
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise port_error(setting, port, bind, error) from error
    return listener


def port_error(setting: str, port: int, bind: str, error: Exception) -> ConfigError:
    """The error for a port that cannot be opened."""
    return ConfigError(setting, port, f"a free port of {bind} ({error})")


def host_port(host: str, port: int) -> str:
    """``127.0.0.1:80``, or ``[::1]:80``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
