"""What can be known before a run starts its first process: settings, extras, files, ports, store.

What no later try can mend is refused: a setting, a script or a rule that is wrong, a file that is
no store. So is what keeps ingest from listening. Anything else may pass, such as a port of a page
that somebody else has, or a database that does not answer: that is a warning, the run starts, and
the process that needs it is started again and again, with growing pauses.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from pathlib import Path

from batchmill.alerts import load_rules
from batchmill.errors import ConfigError
from batchmill.export import is_scraped, page_address, require_exporter
from batchmill.extras import lacks_extra, require_extras
from batchmill.run.home import Home
from batchmill.run.settings import RunSettings
from batchmill.run.specs import SPOOL_SETTINGS
from batchmill.store import (
    RetryPolicy,
    StoreFullError,
    StoreMissingError,
    StoreUnavailableError,
    open_store,
)

_PATIENCE = RetryPolicy(give_up_after_s=5.0)
_RECEIVING = ("http_port", "grpc_port")
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
    rules = settings["alerts"]
    topics = (settings["kafka"], settings["export_traces"], settings["export_logs"])
    needed = {
        "cli": True,
        "spark": True,
        "otlp": True,
        "demo": demo,
        "kafka": any(topics),
        "export": bool(settings["export_to"]),
        "alerts": bool(rules) and lacks_extra(lambda: load_rules(rules)),
    }
    # A run goes on without its web UI; but who installs the others may want that, too.
    also = ["web"] if settings["web"] else []
    extras = [extra for extra, is_needed in needed.items() if is_needed]
    require_extras("batchmill run", *extras, also=also)


def check_ports(settings: RunSettings) -> list[str]:
    """Raise unless ingest can listen, and every port can be opened; each is closed again.

    The ports of pages may be in use, and their addresses not there yet: those are returned, as
    warnings. The web UI is left out: it says so itself.
    """
    bind, targets = settings["bind"], settings["export_to"]
    wanted = [(name, bind, settings[name]) for name in _RECEIVING]
    if first := settings["metrics_port"]:
        places = [0, *(place for place, to in enumerate(targets, 1) if not is_scraped(to))]
        places += [1 + len(targets)] if settings["alerts"] else []
        wanted += [("metrics_port", bind, first + place) for place in places]
    if pages := list(filter(is_scraped, targets)):
        from batchmill.export import PrometheusSettings

        addresses = map(page_address, pages)
        wanted += [("export_to", host, port or PrometheusSettings.port) for host, port in addresses]
    taken: dict[tuple[str, int], str] = {}
    warnings = []
    with contextlib.ExitStack() as listeners:
        for name, host, port in wanted:
            if port and (other := taken.get((host, port))):
                raise ConfigError(name, port, f"another port than {other}'s")
            taken[host, port] = name
            try:
                listeners.enter_context(contextlib.closing(_open_port(name, host, port)))
            except ConfigError as error:
                why = _why_not_yet(error.__cause__)
                if name in _RECEIVING or why is None:
                    raise
                warnings.append(
                    f"no page on port {port} of {host} for now, {why}: it is tried again "
                    f"(set {name})"
                )
    return warnings


def _why_not_yet(cause: BaseException | None) -> str | None:
    """Why a port cannot be opened, if a later try may succeed; else None."""
    if isinstance(cause, OSError):
        if cause.errno == errno.EADDRINUSE:
            return "another process listens there"
        if _is_elsewhere(cause):
            return "this machine does not have that address"
    return None


def _is_elsewhere(error: OSError) -> bool:
    """Whether an address is none of this machine, or a name that does not resolve."""
    # create_server() raises OSError with the number of a gaierror, and not the gaierror itself.
    return error.errno in (errno.EADDRNOTAVAIL, socket.EAI_NONAME, socket.EAI_AGAIN)


def check_store(home: Home) -> list[str]:
    """Raise if the folders hold no files, or what is there is no store; a store may be missing.

    One that cannot be used at the moment is returned, as a warning: spans wait in the spool.
    """
    home.check_writable()
    try:
        open_store(home.store_url, retry=_PATIENCE, create=False).close()
    except StoreMissingError:
        pass
    except (StoreUnavailableError, StoreFullError) as error:
        return [f"the store cannot be used for now, spans are received and wait: {error}"]
    return []


def _open_port(name: str, host: str, port: int) -> socket.socket:
    try:
        return socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        )
    except OSError as error:
        if _is_elsewhere(error):
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
