"""How each process of a run is started: its command line and its environment.

Every user of the machine can see command lines, so secrets go into the environment or a file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from batchmill.export import is_scraped, reads_store
from batchmill.run.home import Home
from batchmill.run.settings import RunSettings
from batchmill.run.supervisor import Spec

ALERTS = "alerts"
EXPORT = "export"
WEB = "web"
TOKEN_VARIABLE = "BATCHMILL_TOKEN"
ALERTS_HEADERS_VARIABLE = "BATCHMILL_ALERTS_HEADERS"
ALERTS_TO_VARIABLE = "BATCHMILL_ALERTS_TO"
EXPORT_HEADERS_VARIABLE = "BATCHMILL_EXPORT_HEADERS"
EXPORT_TOKEN_VARIABLE = "BATCHMILL_EXPORT_TOKEN"
EXPORTER_PREFIX = "run "
"""The names of a run's exporters in the store begin with this."""
READY, READY_FOR_MESSAGES = "waiting for segments", "waiting for messages"
"""What the pipeline prints once it runs, and reads a spool or a topic."""
SPOOL_SETTINGS = (
    *("segment_rows", "unread_warning_mb", "unread_critical_mb", "unread_critical_plus_mb"),
)
"""Settings that a run with a topic must not have."""
SENDING_SETTINGS = (
    *("export_buffer", "export_batch", "export_poll", "export_timeout", "export_retry_max"),
    "export_drain",
)
"""Settings of exporters that send; a page that is scraped has none of them."""
_TLS_SETTINGS = ("tls_cert", "tls_key", "tls_client_ca")
_SERVER_SETTINGS = ("bind", "token_file", *_TLS_SETTINGS, "insecure")


def ingest_spec(settings: RunSettings, home: Home) -> Spec:
    """The process that receives spans."""
    arguments = ["ingest", "--home", str(home.folder)]
    arguments += _options(
        settings,
        *(*_SERVER_SETTINGS, "http_port", "grpc_port", "max_body_mb", "max_connections"),
        *("request_timeout", "metrics", "logs", "export_traces", "export_logs"),
    )
    if settings["ingest_processes"] > 1:
        arguments += ["--processes", str(settings["ingest_processes"])]
    if settings["kafka"]:
        arguments += ["--to", settings["kafka"]]
        if not settings.is_default("linger"):  # the default is for segments
            arguments += _options(settings, "linger")
    else:
        arguments += _options(settings, "linger", *SPOOL_SETTINGS)
        if settings["keep_spans"] == "off":
            arguments.append("--no-span-events")
    if settings["export_traces"] or settings["export_logs"]:
        arguments += _options(settings, "export_forward_buffer", "export_forward_mb")
    if settings["kafka"] or settings["export_traces"] or settings["export_logs"]:
        arguments += _options(settings, "kafka_config")
    return Spec(
        name="ingest",
        arguments=arguments,
        environment=_token(settings),
        ready_file=home.ingest,
        essential=True,
    )


def web_spec(settings: RunSettings, home: Home) -> Spec:
    """The process that serves the web UI."""
    arguments = ["web", "--home", str(home.folder), "--port", str(settings["web_port"])]
    arguments += ["--status", str(home.web), *_options(settings, *_SERVER_SETTINGS)]
    arguments += _options(settings, "keep_names")
    return Spec(
        name=WEB,
        title="web UI",
        arguments=arguments,
        environment=_token(settings),
        ready_file=home.web,
    )


def pipeline_spec(settings: RunSettings, home: Home) -> Spec:
    """The process that computes metrics on Spark."""
    arguments = ["pipeline", "--store", home.store_url]
    if settings["kafka"]:
        arguments += ["--source", settings["kafka"], *_options(settings, "kafka_config")]
    else:
        arguments += ["--remove-read", "--spool", str(home.spool)]
    arguments += ["--checkpoint", str(home.checkpoint), "--quarantine", str(home.quarantine)]
    arguments += ["--temporary", str(home.temporary)]
    arguments += _options(
        settings,
        *("master", "trigger", "ttl_days", "top_n", "oal", "sources", "conf", "apdex"),
        *("max_new_entities", "max_entities", "keep_names"),
    )
    if settings["keep_spans"] != "off":
        arguments += ["--keep-spans", str(home.traces)]
        arguments += _options(settings, "keep_spans_hours", "keep_spans_mb")
    if settings["dedup"] != "off":
        arguments += _options(settings, "dedup")
    if not all(map(reads_store, settings["export_to"])):
        arguments += ["--outbox", "--outbox-mb", str(settings["export_outbox_mb"])]
    arguments += _metrics_page(settings)
    ready = READY_FOR_MESSAGES if settings["kafka"] else READY
    environment = _token(settings) if settings["metrics_port"] else {}
    return Spec(name="pipeline", arguments=arguments, environment=environment, ready_line=ready)


def export_names(targets: Sequence[str]) -> list[str]:
    """The names of the exporting processes: ``export``, ``export-2`` and so on."""
    return [f"{EXPORT}-{number}" if number > 1 else EXPORT for number in range(1, len(targets) + 1)]


def export_spec(settings: RunSettings, home: Home, name: str, target: str) -> Spec:
    """The process that exports to one target."""
    arguments = ["export", "--to", target, "--name", f"{EXPORTER_PREFIX}{target}"]
    arguments += ["--store", home.store_url, "--checkpoint", str(home.checkpoint)]
    arguments += ["--status", str(home.export(name))]
    if is_scraped(target):
        arguments += _options(settings, *_TLS_SETTINGS)
        if settings["keep_spans"] != "off":
            arguments += ["--traces", str(home.traces)]
    else:
        # --buffer of `batchmill export` is --export-buffer of a run.
        options = _options(settings, *SENDING_SETTINGS)
        arguments += [word.replace("--export-", "--") for word in options]
    if target.startswith("kafka://"):
        arguments += _options(settings, "kafka_config")
    environment = {}
    if settings["export_headers"]:
        environment[EXPORT_HEADERS_VARIABLE] = ",".join(settings["export_headers"])
    if settings["export_token"]:
        environment[EXPORT_TOKEN_VARIABLE] = settings["export_token"]
    if not is_scraped(target):
        position = export_names(settings["export_to"]).index(name)
        arguments += _metrics_page(settings, 1 + position)
        environment |= _token(settings) if settings["metrics_port"] else {}
    return Spec(
        name=name, arguments=arguments, environment=environment, ready_file=home.export(name)
    )


def alerts_spec(settings: RunSettings, home: Home, rules: str, grace_s: float) -> Spec:
    """The process that evaluates alert rules."""
    arguments = ["alerts", "run", "--rules", rules, "--store", home.store_url]
    arguments += ["--grace", f"{grace_s:g}", "--status", str(home.alerts)]
    environment = {}
    # Addresses of webhooks are often secrets.
    if settings["alerts_to"]:
        environment[ALERTS_TO_VARIABLE] = " ".join(settings["alerts_to"])
    if settings["alerts_headers"]:
        environment[ALERTS_HEADERS_VARIABLE] = ",".join(settings["alerts_headers"])
    if settings["metrics_port"]:
        arguments += _metrics_page(settings, 1 + len(settings["export_to"]))
        environment |= _token(settings)
    return Spec(name=ALERTS, arguments=arguments, environment=environment, ready_file=home.alerts)


def demo_spec(settings: RunSettings, http: str, seconds: float, seed: int | None) -> Spec:
    """The process that sends the demo's traffic to ``http``, ingest's address."""
    host, _, port = http.rpartition(":")
    if host in ("0.0.0.0", "[::]", "::", ""):
        host = "127.0.0.1"
    arguments = ["demo", "--endpoint", f"http://{host}:{port}", "--incidents"]
    arguments += ["--forever"] if math.isinf(seconds) else ["--seconds", f"{seconds:g}"]
    if seed is not None:
        arguments += ["--seed", str(seed)]
    token = settings["token"]
    if token is None and settings["token_file"]:
        token = Path(settings["token_file"]).read_text("utf-8").strip()
    environment = {}
    if token:
        environment["OTEL_EXPORTER_OTLP_HEADERS"] = f"authorization={quote(f'Bearer {token}')}"
    return Spec(name="demo", arguments=arguments, environment=environment, restart=False)


_PORT_OPTIONS = {"http": "--http-port", "grpc": "--grpc-port", "address": "--port"}
"""The addresses in a process's report, and the options that set their ports."""


def with_ports(spec: Spec, report: Mapping[str, Any]) -> Spec:
    """The same with the ports of a process's report, so that a restart listens on them again."""
    arguments = list(spec.arguments)
    for name, option in _PORT_OPTIONS.items():
        port = str(report.get(name, "")).rpartition(":")[2]
        if port.isdecimal() and option in arguments:
            arguments[arguments.index(option) + 1] = port
    return replace(spec, arguments=arguments)


def _metrics_page(settings: RunSettings, offset: int = 0) -> list[str]:
    """The options of a process's page for Prometheus, with the access of ingest and the web UI."""
    if not settings["metrics_port"]:
        return []
    arguments = ["--metrics-port", str(settings["metrics_port"] + offset)]
    flags = {settings.values[name].setting.flag for name in _SERVER_SETTINGS}
    return arguments + [
        word.replace("--", "--metrics-", 1) if word in flags else word
        for word in _options(settings, *_SERVER_SETTINGS)
    ]


def _options(settings: RunSettings, *names: str) -> list[str]:
    """Settings as options of a command; those without a value are left out."""
    arguments = []
    for name in names:
        setting, value = settings.values[name].setting, settings[name]
        if setting.kind.switch:
            arguments += [setting.flag] if value else []
        elif setting.kind.many:
            arguments += [word for part in value for word in (setting.flag, part)]
        elif value is not None:
            arguments += [setting.flag, str(value)]
    return arguments


def _token(settings: RunSettings) -> dict[str, str]:
    return {TOKEN_VARIABLE: settings["token"]} if settings["token"] else {}
