"""How the processes of a run are started: their arguments, and what must not be among them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from batchmill.cli import prometheus
from batchmill.cli.config import Settings
from batchmill.run.home import Home
from batchmill.run.supervisor import Spec

EXPORT = "export"
WEB = "web"
RUN_EXPORTER = "run "
"""What the names of a run's exporters begin with, in the store."""
READY, READY_FOR_MESSAGES = "waiting for segments", "waiting for messages"
"""What the pipeline says once it runs, and reads a spool or a topic."""
_OF_A_SPOOL = (
    *("linger", "segment_rows"),
    *("unread_warning_mb", "unread_critical_mb", "unread_critical_plus_mb"),
)


def ingest_spec(settings: Settings, home: Home) -> Spec:
    """How ingest is started."""
    arguments = ["ingest", "--home", str(home.folder)]
    for name in (
        *("bind", "http_port", "grpc_port", "token_file", "tls_cert", "tls_key", "tls_client_ca"),
        *("max_body_mb", "max_connections", "request_timeout"),
        *(() if settings["kafka"] else _OF_A_SPOOL),
    ):
        if settings[name] is not None:
            arguments += [f"--{name.replace('_', '-')}", str(settings[name])]
    if settings["insecure"]:
        arguments.append("--insecure")
    onward = [name for name in ("export_traces", "export_logs") if settings[name]]
    for name in onward:
        arguments += [f"--{name.replace('_', '-')}", settings[name]]
    if settings["kafka"]:
        arguments += ["--to", settings["kafka"]]
        if settings.chosen["linger"].origin != "default":  # that is for segments
            arguments += ["--linger", str(settings["linger"])]
    if settings["kafka"] or onward:
        arguments += _kafka_config(settings)
    # Not on the command line, which everybody on this machine can see.
    environment = {"BATCHMILL_TOKEN": settings["token"]} if settings["token"] else {}
    return Spec(name="ingest", arguments=arguments, environment=environment, ready_file=home.ingest)


PORTS = {"http": "--http-port", "grpc": "--grpc-port", "address": "--port"}
"""What a process tells of where it listens, and how it is told to listen there."""


def pinned(spec: Spec, found: Mapping[str, Any]) -> Spec:
    """The same with the ports that a process was given, so that its next life has them, too."""
    arguments = list(spec.arguments)
    for name, option in PORTS.items():
        port = str(found.get(name, "")).rpartition(":")[2]
        if port.isdecimal() and option in arguments:
            arguments[arguments.index(option) + 1] = port
    return replace(spec, arguments=arguments)


def web_spec(settings: Settings, home: Home) -> Spec:
    """How the server of the pages is started; a run without it is still a run."""
    arguments = ["web", "--home", str(home.folder), "--port", str(settings["web_port"])]
    arguments += ["--status", str(home.web)]
    for name in ("bind", "token_file", "tls_cert", "tls_key", "tls_client_ca"):
        if settings[name] is not None:
            arguments += [f"--{name.replace('_', '-')}", str(settings[name])]
    if settings["insecure"]:
        arguments.append("--insecure")
    # Not on the command line, which everybody on this machine can see.
    environment = {"BATCHMILL_TOKEN": settings["token"]} if settings["token"] else {}
    return Spec(
        name=WEB, arguments=arguments, environment=environment, ready_file=home.web, vital=False
    )


def pipeline_spec(settings: Settings, home: Home) -> Spec:
    """How the pipeline is started."""
    arguments = ["pipeline", "--store", home.store_url]
    if settings["kafka"]:
        arguments += ["--source", settings["kafka"], *_kafka_config(settings)]
    else:
        arguments += ["--remove-read", "--spool", str(home.spool)]
    for name in ("checkpoint", "quarantine"):
        arguments += [f"--{name}", str(getattr(home, name))]
    for name in ("master", "trigger", "ttl_days", "top_n"):
        arguments += [f"--{name.replace('_', '-')}", str(settings[name])]
    for name in ("oal", "sources", "conf", "apdex"):
        for each in settings[name]:
            arguments += [f"--{name}", each]
    if settings["dedup"] != "off":
        arguments += ["--dedup", settings["dedup"]]
    if not all(map(prometheus.takes, settings["export_to"])):
        arguments += ["--outbox", "--outbox-mb", str(settings["export_outbox_mb"])]
    ready = READY_FOR_MESSAGES if settings["kafka"] else READY
    return Spec(name="pipeline", arguments=arguments, ready_line=ready)


def export_names(targets: Sequence[str]) -> list[str]:
    """What the processes that export are called: ``export``, ``export-2`` and so on."""
    return [f"{EXPORT}-{number}" if number > 1 else EXPORT for number in range(1, len(targets) + 1)]


def export_spec(settings: Settings, home: Home, name: str, target: str) -> Spec:
    """How an exporter is started."""
    arguments = ["export", "--to", target, "--name", f"{RUN_EXPORTER}{target}"]
    arguments += ["--store", home.store_url, "--checkpoint", str(home.checkpoint)]
    arguments += ["--status", str(home.export(name))]
    if target.startswith("kafka://"):
        arguments += _kafka_config(settings)
    headers = settings["export_headers"]
    # Not on the command line, which everybody on this machine can see.
    environment = {"BATCHMILL_EXPORT_HEADERS": ",".join(headers)} if headers else {}
    if settings["export_token"]:
        environment[prometheus.TOKEN_VARIABLE] = settings["export_token"]
    return Spec(
        name=name, arguments=arguments, environment=environment, ready_file=home.export(name)
    )


def _kafka_config(settings: Settings) -> list[str]:
    """The file's name; what is in it is not on the command line, which everybody here can see."""
    return ["--kafka-config", settings["kafka_config"]] if settings["kafka_config"] else []


def demo_spec(settings: Settings, http: str, seconds: float, seed: int | None) -> Spec:
    """How the demo's traffic is started, against the address that ingest has told."""
    host, _, port = http.rpartition(":")
    if host in ("0.0.0.0", "[::]", "::", ""):
        host = "127.0.0.1"
    arguments = ["demo", "--endpoint", f"http://{host}:{port}"]
    arguments += ["--forever"] if math.isinf(seconds) else ["--seconds", f"{seconds:g}"]
    if seed is not None:
        arguments += ["--seed", str(seed)]
    token = settings["token"]
    if token is None and settings["token_file"]:
        token = Path(settings["token_file"]).read_text("utf-8").strip()
    environment = {}
    if token:
        environment["OTEL_EXPORTER_OTLP_HEADERS"] = f"authorization={quote(f'Bearer {token}')}"
    return Spec(name="demo", arguments=arguments, environment=environment, keep=False)
