"""The settings that all servers share, and the socket they listen on."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field, fields

from batchmill.errors import ConfigError
from batchmill.http.access import Access

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
    """Open at a time; one more is answered 503."""
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
