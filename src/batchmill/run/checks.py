"""What can be known before a run starts its first process: settings, extras, files, ports, store.

A process that cannot start is started again and again, with growing pauses. So everything that
would keep one from starting is checked first, and said at once.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from pathlib import Path

from batchmill.alerts import load_rules
from batchmill.errors import ConfigError
from batchmill.export import is_scraped, page_address, require_exporter
from batchmill.extras import require_extras
from batchmill.run.home import Home
from batchmill.run.settings import RunSettings
from batchmill.run.specs import SPOOL_SETTINGS
from batchmill.store import RetryPolicy, StoreMissingError, open_store

_PATIENCE = RetryPolicy(give_up_after_s=5.0)
_FILES = ("token_file", "tls_cert", "tls_key", "tls_client_ca", "kafka_config")


def check_settings(settings: RunSettings, *, demo: bool) -> None:
    """Raise if something that the run needs is missing or wrong; touches no folder and no port."""
    check_extras(settings, demo=demo)
    from batchmill.spark import find_java

    find_java()
    if demo and settings["tls_cert"]:
        raise ConfigError("--demo", "with tls_cert", "without TLS: the demo sends plain HTTP")
    for name in _FILES:
        _check_file(name, settings[name])
    if settings["alerts"]:
        load_rules(settings["alerts"])
    _check_kafka(settings)
    for target in (*settings["export_to"], settings["export_traces"], settings["export_logs"]):
        if target is not None:
            require_exporter(target)
    _check_access(settings)


def check_extras(settings: RunSettings, *, demo: bool) -> None:
    """Raise one error for all extras that the run needs and that are not installed."""
    topics = (settings["kafka"], settings["export_traces"], settings["export_logs"])
    needed = {
        "cli": True,
        "spark": True,
        "otlp": True,
        "demo": demo,
        "kafka": any(topics),
        "export": bool(settings["export_to"]),
    }
    # A run goes on without its web UI; but who installs the others may want that, too.
    also = ["web"] if settings["web"] else []
    extras = [extra for extra, is_needed in needed.items() if is_needed]
    require_extras("batchmill run", *extras, also=also)


def check_ports(settings: RunSettings) -> None:
    """Raise unless every port that must be free is free; each is opened and closed again.

    The web UI is left out: a run goes on without it, and says so.
    """
    bind, pages = settings["bind"], list(filter(is_scraped, settings["export_to"]))
    wanted = [(name, bind, settings[name]) for name in ("http_port", "grpc_port")]
    if (first := settings["metrics_port"]) is not None:
        processes = 1 + len(settings["export_to"]) - len(pages)
        wanted += [("metrics_port", bind, first + number) for number in range(processes)]
    if pages:
        from batchmill.export import PrometheusSettings

        addresses = map(page_address, pages)
        wanted += [("export_to", host, port or PrometheusSettings.port) for host, port in addresses]
    taken: dict[tuple[str, int], str] = {}
    with contextlib.ExitStack() as listeners:
        for name, host, port in wanted:
            if port and (other := taken.get((host, port))):
                raise ConfigError(name, port, f"another port than {other}'s")
            taken[host, port] = name
            listeners.enter_context(contextlib.closing(_open_port(name, host, port)))


def check_store(home: Home) -> None:
    """Raise unless the store, if there is one, can be opened, and the folders hold files."""
    home.check_writable()
    with contextlib.suppress(StoreMissingError):
        open_store(home.store_url, retry=_PATIENCE, create=False).close()


def _open_port(name: str, host: str, port: int) -> socket.socket:
    try:
        return socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        )
    except OSError as error:
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            allowed = f"an address of this machine ({error.strerror})"
            raise ConfigError("bind", host, allowed) from error
        if error.errno == errno.EADDRINUSE:
            allowed = f"a free port of {host}, or 0 for any: another process listens on {port}"
            raise ConfigError(name, port, allowed) from error
        allowed = f"a port of {host} that can be opened ({error.strerror})"
        raise ConfigError(name, port, allowed) from error


def _check_file(name: str, file: str | None) -> None:
    if file is None:
        return
    try:
        with Path(file).open("rb"):
            pass
    except OSError as error:
        allowed = f"a file that can be read ({error.strerror})"
        raise ConfigError(name, file, allowed) from error


def _check_access(settings: RunSettings) -> None:
    from batchmill.http import Access

    if settings["token"] and settings["token_file"]:
        raise ConfigError("token_file", settings["token_file"], "left out where there is a token")
    token = settings["token"]
    if file := settings["token_file"]:
        token = Path(file).read_text("utf-8").strip()
        if not token:
            raise ConfigError("token_file", file, "a file with a token: it is empty")
    paths = [settings[name] and Path(settings[name]) for name in _FILES[1:4]]
    access = Access(token=token, tls_cert=paths[0], tls_key=paths[1], client_ca=paths[2])
    access.check_bind(settings["bind"], settings["insecure"])
    access.ssl_context()


def _check_kafka(settings: RunSettings) -> None:
    from batchmill.kafka import check_accepted, read_options

    options = read_options(Path(file)) if (file := settings["kafka_config"]) else {}
    if not settings["kafka"]:
        return
    check_accepted(options)
    for name in SPOOL_SETTINGS:
        if not settings.is_default(name):
            allowed = "left out with kafka: a topic has no segments, and its retention bounds it"
            raise ConfigError(name, settings[name], allowed)
