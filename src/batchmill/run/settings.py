"""The settings of ``batchmill run``, and where each value comes from.

A setting has one name in three spellings, in rising order of precedence: ``http_port`` in
``batchmill.toml``, ``BATCHMILL_HTTP_PORT`` in the environment, ``--http-port`` on the command line.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchmill.errors import BatchmillError, ConfigError
from batchmill.export import PROMETHEUS_ADDRESSES, check_address, reads_store

FILE = "batchmill.toml"
PREFIX = "BATCHMILL_"
CONFIG_VARIABLE = "BATCHMILL_CONFIG"
OTHER_VARIABLES = frozenset({CONFIG_VARIABLE, "BATCHMILL_SOAK", "BATCHMILL_SPARK_ARCHIVE"})
"""Variables that are no settings: the path of the file, and those of batchmill's own tests."""
DEFAULT = "default"
HIDDEN = "(hidden)"
_DAY_S = 86_400.0


class UnknownSettingError(BatchmillError, LookupError):
    """There is no setting of that name."""

    name: str
    origin: str
    nearest: str | None
    exit_code = 2

    def __str__(self) -> str:
        hint = f"did you mean {self.nearest}? " if self.nearest else ""
        return (
            f"{self.origin}: there is no setting {self.name}; {hint}"
            "`batchmill config show` lists them all"
        )


class ConfigFileError(BatchmillError, ValueError):
    """The settings file cannot be read."""

    path: str
    why: str
    exit_code = 2
    template = "{path} cannot be read: {why}. Correct it, or name another with --config"


@dataclass(frozen=True)
class Kind:
    """The type of a setting."""

    parse: Callable[[Any], Any]
    """Converts a text, or a value of TOML; raises ValueError or KeyError if it is not valid."""
    allowed: str
    metavar: str = "X"
    many: bool = False
    switch: bool = False
    path: bool = False


@dataclass(frozen=True)
class Setting:
    """One setting of ``batchmill run``."""

    name: str
    kind: Kind
    default: Any
    help: str
    secret: bool = False

    @property
    def variable(self) -> str:
        """Its name in the environment."""
        return PREFIX + self.name.upper()

    @property
    def flag(self) -> str:
        """Its name on the command line."""
        return "--" + self.name.replace("_", "-")


@dataclass(frozen=True)
class SettingValue:
    """The value of a setting, and where it comes from."""

    setting: Setting
    value: Any
    origin: str

    def shown(self) -> Any:
        """The value as it may be shown."""
        return HIDDEN if self.setting.secret and self.value not in (None, ()) else self.value


def _text(given: Any) -> str:
    if not isinstance(given, str) or not given:
        raise ValueError
    return given


def _texts(given: Any, separator: str | None) -> tuple[str, ...]:
    """A list of texts, or one text with ``separator`` between them; None: white space."""
    if isinstance(given, str):
        given = [part.strip() for part in given.split(separator)]
    if not isinstance(given, list | tuple):
        raise ValueError
    return tuple(_text(part) for part in given)


def _comma_separated(given: Any) -> tuple[str, ...]:
    return _texts(given, ",")


def _switch(given: Any) -> bool:
    known = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    return given if isinstance(given, bool) else known[str(given).lower()]


def _whole(least: int, most: int) -> Kind:
    def parse(given: Any) -> int:
        if isinstance(given, bool) or not isinstance(given, int | str):
            raise ValueError
        value = int(given)
        if not least <= value <= most:
            raise ValueError
        return value

    return Kind(parse, f"a whole number from {least} to {most}", "N")


def _choice(*values: str) -> Kind:
    def parse(given: Any) -> str:
        if given not in values:
            raise ValueError
        return str(given)

    return Kind(parse, " or ".join(values), "|".join(values))


def _seconds(given: Any) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float | str):
        raise ValueError
    value = float(given)
    if not 0 <= value <= _DAY_S:  # also refuses nan
        raise ValueError
    return value


def _period(given: Any) -> float:
    value = _seconds(given)
    if not value:
        raise ValueError
    return value


def _duration(given: Any) -> str:
    """As ``batchmill pipeline --dedup`` takes it; ``off`` for none."""
    text = _text(given)
    if text != "off" and not (text[:-1].isdecimal() and text[-1] in "smh"):
        raise ValueError
    return text


def _addresses(given: Any) -> tuple[str, ...]:
    """Addresses of exporters; Kafka's have commas, so there is white space between two."""
    return tuple(_address(text) for text in _texts(given, None))


def _address(text: str) -> str:
    # The exporter's command line has it, which everybody on this machine can see.
    if reads_store(text) and "@" in text:
        raise ValueError
    return check_address(text)


def _receivers(given: Any) -> tuple[str, ...]:
    """Addresses of receivers of alerts, with white space between two."""
    from batchmill.alerts import Receiver

    urls = _texts(given, None)
    for url in urls:
        Receiver.parse(url)
    return urls


def _export_topic(given: Any) -> str:
    address = _address(_text(given))
    if not address.startswith("kafka://"):
        raise ValueError
    return address


def _spans_topic(given: Any) -> str:
    from batchmill.kafka import KafkaAddress

    return str(KafkaAddress.parse(_text(given)))


TEXT = Kind(_text, "a text that is not empty", "TEXT")
PATH = Kind(_text, "a path", "PATH", path=True)
PATHS = Kind(_comma_separated, "paths", "PATH", many=True, path=True)
NAMES = Kind(_comma_separated, "names", "NAME", many=True)
PAIRS = Kind(_comma_separated, "NAME=VALUE, or a list of them", "NAME=VALUE", many=True)
TARGETS = Kind(
    _addresses,
    "otlp+grpc://host:port, otlp+http://host:port, kafka://host:port/topic, "
    f"{PROMETHEUS_ADDRESSES}, without a login, or a list of them",
    "TARGET",
    many=True,
)
RECEIVERS = Kind(
    _receivers,
    "http://host:port/path or https://…, alertmanager+http://host:port or alertmanager+https://…, "
    "or a list of them",
    "URL",
    many=True,
)
TARGET = Kind(_export_topic, "kafka://host:port/topic", "TARGET")
SPANS_TOPIC = Kind(
    _spans_topic, "kafka://host:port[,host:port]/topic, without a login: see kafka_config", "TOPIC"
)
SWITCH = Kind(_switch, "true or false", switch=True)
SECONDS = Kind(_seconds, f"a number of seconds from 0 to {_DAY_S:g}", "S")
PERIOD = Kind(_period, f"a number of seconds above 0, up to {_DAY_S:g}", "S")
DURATION = Kind(_duration, "a number with s, m or h, such as 10m, or off", "10m")
PORT = _whole(0, 65_535)
COUNT = _whole(1, 1_000_000)

SETTINGS: tuple[Setting, ...] = (
    Setting("home", PATH, "batchmill-data", "the folder for all state"),
    Setting("bind", TEXT, "127.0.0.1", "the address that ingest and the web UI listen on"),
    Setting("http_port", PORT, 4318, "port of OTLP/HTTP; 0 for any free port"),
    Setting("grpc_port", PORT, 4317, "port of OTLP/gRPC; 0 for any free port"),
    Setting(
        "ingest_processes", _whole(1, 64), 1, "processes of ingest, for more than one core; Linux"
    ),
    Setting("token", TEXT, None, "the bearer token that clients must send", secret=True),
    Setting("token_file", PATH, None, "a file with that token"),
    Setting("tls_cert", PATH, None, "the certificate of ingest, web UI and Prometheus pages"),
    Setting("tls_key", PATH, None, "its key"),
    Setting("tls_client_ca", PATH, None, "the CA whose client certificates are accepted (mTLS)"),
    Setting("insecure", SWITCH, False, "listen beyond this machine without token or mTLS"),
    Setting(
        "metrics",
        _choice("discard", "refuse"),
        "discard",
        "what requests with metrics get: success, or an error",
    ),
    Setting(
        "logs",
        _choice("discard", "refuse", "forward"),
        None,
        "the same for logs; unset: forward with export_logs, else discard",
    ),
    Setting("max_body_mb", COUNT, None, "the largest request body accepted"),
    Setting("max_connections", COUNT, None, "the most connections, for HTTP and gRPC each"),
    Setting("request_timeout", SECONDS, None, "how long a whole request may take to arrive"),
    Setting("linger", SECONDS, 0.2, "how long a segment waits for more spans"),
    Setting("segment_rows", COUNT, 50_000, "the most spans in a segment"),
    Setting("unread_warning_mb", COUNT, None, "unread data in the spool at which WARNING begins"),
    Setting("unread_critical_mb", COUNT, None, "the same for CRITICAL: senders must wait"),
    Setting(
        "unread_critical_plus_mb", COUNT, None, "the same for CRITICAL_PLUS: bodies are not read"
    ),
    Setting("kafka", SPANS_TOPIC, None, "a Kafka topic instead of the spool"),
    Setting("kafka_config", PATH, None, "a file for all Kafka clients: TLS, user, password"),
    Setting("oal", PATHS, (), "OAL scripts, instead of the core metrics"),
    Setting("sources", NAMES, (), "modules with your own event types"),
    Setting("master", TEXT, "local[*]", "where Spark runs"),
    Setting("conf", PAIRS, (), "settings for Spark, NAME=VALUE"),
    Setting("trigger", SECONDS, 1.0, "how often the pipeline looks for segments"),
    Setting("dedup", DURATION, "10m", "how long a span is remembered, to count it once; or off"),
    Setting("apdex", PAIRS, (), "apdex thresholds, SERVICE=MS"),
    Setting("ttl_days", COUNT, 7, "how long metrics are kept"),
    Setting("top_n", COUNT, 50, "how many of the slowest statements are kept"),
    Setting(
        "max_new_entities",
        _whole(0, 10**9),
        5_000,
        "new entities of an event type a minute; the rest is counted as `overflow`; 0 for no limit",
    ),
    Setting(
        "max_entities",
        _whole(0, 10**9),
        1_000_000,
        "entities of a kind in the store; new ones beyond it are counted as `overflow`, too; "
        "0 for no limit",
    ),
    Setting("keep_names", SWITCH, False, "leave ids in span names that look like URLs"),
    Setting(
        "keep_spans",
        _choice("on", "off"),
        "on",
        "whether spans are kept, to look at traces",
    ),
    Setting("keep_spans_hours", COUNT, 24, "how long they are kept"),
    Setting("keep_spans_mb", COUNT, 2048, "how many MiB of them; beyond it the oldest are dropped"),
    Setting("drain", SECONDS, 15.0, "how long shutdown waits for the pipeline to read the rest"),
    Setting("web", SWITCH, True, "serve the web UI"),
    Setting("web_port", PORT, 8080, "port of the web UI; 0 for any free port"),
    Setting(
        "metrics_port",
        _whole(1, 65_000),
        None,
        "port of the pipeline's page for Prometheus; exporters without one take the next ports",
    ),
    Setting("export_to", TARGETS, (), "where exporters send the changes of each commit"),
    Setting("export_traces", TARGET, None, "a Kafka topic that gets the traces as well"),
    Setting("export_logs", TARGET, None, "a Kafka topic that gets the logs, which are not stored"),
    Setting("export_headers", PAIRS, (), "sent with each request of an exporter", secret=True),
    Setting("export_token", TEXT, None, "the token for scrapes and remote write", secret=True),
    Setting(
        "export_outbox_mb",
        COUNT,
        1024,
        "how much may wait for exporters; beyond it the oldest is dropped",
    ),
    Setting("export_buffer", COUNT, 20_000, "how many values an exporter holds in memory"),
    Setting("export_batch", COUNT, 2_000, "the most values in a request of an exporter"),
    Setting(
        "export_poll",
        PERIOD,
        None,
        "how often an exporter looks for new values while there are none; unset: 0.5 s, remote "
        "write 1 s",
    ),
    Setting(
        "export_timeout",
        PERIOD,
        None,
        "how long a peer may take to answer an exporter; unset: 10 s, remote write 30 s",
    ),
    Setting(
        "export_retry_max",
        PERIOD,
        None,
        "the longest wait between two tries of a request; unset: 15 s, remote write 5 s",
    ),
    Setting("export_drain", PERIOD, 5.0, "how long an exporter that ends sends what it holds"),
    Setting(
        "export_forward_buffer",
        COUNT,
        20_000,
        "how many requests may wait for the topic of export_traces, and for that of export_logs",
    ),
    Setting(
        "export_forward_mb", COUNT, 64, "how many MiB of them; beyond either, they are dropped"
    ),
    Setting("alerts", PATH, None, "a file of alert rules: TOML, YAML, or an alarm-settings.yml"),
    Setting(
        "alerts_to",
        RECEIVERS,
        (),
        "where notifications are sent: webhooks, or alertmanager+http://host:port",
        secret=True,
    ),
    Setting("alerts_headers", PAIRS, (), "sent with each notification", secret=True),
    Setting(
        "alerts_grace",
        SECONDS,
        15.0,
        "how long after its end a minute is evaluated, for rows that come late",
    ),
    Setting("log_mb", COUNT, 10, "the size at which a log file is rotated"),
    Setting("log_files", _whole(1, 100), 3, "how many log files of a process are kept"),
)
BY_NAME: Mapping[str, Setting] = {setting.name: setting for setting in SETTINGS}


class RunSettings:
    """The values of all settings; ``settings["http_port"]`` is one."""

    def __init__(self, values: Mapping[str, SettingValue]) -> None:
        self.values = values

    def __getitem__(self, name: str) -> Any:
        return self.values[name].value

    def is_default(self, name: str) -> bool:
        """Whether nobody has set it."""
        return self.values[name].origin == DEFAULT


def load_settings(
    flags: Mapping[str, Any], file: str | None = None, environ: Mapping[str, str] | None = None
) -> RunSettings:
    """Read the settings from command line, environment and file.

    ``flags`` are those of the command line by name, None: not given. ``file`` must exist if it is
    given, here or as ``BATCHMILL_CONFIG``; else ``batchmill.toml`` is read, if it is there.
    """
    environ = os.environ if environ is None else environ
    given = file or environ.get(CONFIG_VARIABLE)
    path = Path(given or FILE)
    content = _read_file(path, required=bool(given))
    return resolve(content, str(path), environ, flags, path.parent)


def resolve(
    file: Mapping[str, Any] | None,
    file_name: str,
    environ: Mapping[str, str],
    flags: Mapping[str, Any],
    folder: Path = Path(),
) -> RunSettings:
    """All settings, from what was read; paths in the file are relative to its ``folder``."""
    values = {setting.name: SettingValue(setting, setting.default, DEFAULT) for setting in SETTINGS}
    for name, given in _flat(file or {}):
        setting = _known(name, BY_NAME, file_name)
        value = _in_folder(setting, _parse(setting, given, f"{file_name}: {name}"), folder)
        values[name] = SettingValue(setting, value, file_name)
    variables = {setting.variable: setting for setting in SETTINGS}
    for name, text in environ.items():
        if name.startswith(PREFIX) and name not in OTHER_VARIABLES and text:
            setting = _known(name, variables, "environment")
            values[setting.name] = SettingValue(setting, _parse(setting, text, name), name)
    for name, given in flags.items():
        if given is not None:
            setting = BY_NAME[name]
            value = _parse(setting, given, setting.flag)
            values[name] = SettingValue(setting, value, setting.flag)
    return RunSettings(values)


def _flat(file: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The settings in a file; ``to`` in the table ``[export]`` is ``export_to``."""
    for name, given in file.items():
        # web is a setting, and so is web_port: `web = false` is as good as a table `[web]`.
        is_table = name not in BY_NAME or any(known.startswith(f"{name}_") for known in BY_NAME)
        if isinstance(given, dict) and is_table:
            yield from ((f"{name}_{key}", value) for key, value in given.items())
        else:
            yield name, given


def _read_file(path: Path, *, required: bool) -> dict[str, Any] | None:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        if required:
            raise ConfigFileError(str(path), "there is no such file") from None
        return None
    except OSError as error:
        raise ConfigFileError(str(path), error.strerror or str(error)) from error
    except ValueError as error:  # not TOML, or not UTF-8
        raise ConfigFileError(str(path), str(error)) from error


def _known(name: str, names: Mapping[str, Setting], origin: str) -> Setting:
    if name in names:
        return names[name]
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    raise UnknownSettingError(name, origin, near[0] if near else None)


def _parse(setting: Setting, given: Any, where: str) -> Any:
    try:
        return setting.kind.parse(given)
    except (ValueError, KeyError):
        # An address with a login must not be repeated in a message.
        secret = setting.secret or isinstance(given, dict) or "@" in str(given)
        raise ConfigError(where, HIDDEN if secret else given, setting.kind.allowed) from None


def _in_folder(setting: Setting, value: Any, folder: Path) -> Any:
    if not setting.kind.path:
        return value
    if setting.kind.many:
        return tuple(str(folder / path) for path in value)
    return str(folder / value)
