"""The settings of ``batchmill run``, and where each value comes from.

One name in three spellings, in rising order of precedence: ``http_port`` in ``batchmill.toml``,
``BATCHMILL_HTTP_PORT`` in the environment, ``--http-port`` on the command line.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchmill.cli import prometheus
from batchmill.errors import BatchmillError, ConfigError

FILE = "batchmill.toml"
PREFIX = "BATCHMILL_"
CONFIG_VARIABLE = "BATCHMILL_CONFIG"
OTHERS = frozenset({CONFIG_VARIABLE, "BATCHMILL_SOAK", "BATCHMILL_SPARK_ARCHIVE"})
"""Variables that are no settings: the file's place, and those of batchmill's own tests."""
HIDDEN = "(hidden)"
_DAY_S = 86_400.0


class UnknownSettingError(BatchmillError, LookupError):
    """There is no setting of that name; carries ``name``, ``origin`` and ``nearest``."""

    def __init__(self, name: str, origin: str, nearest: str | None) -> None:
        super().__init__(name, origin, nearest)
        self.name = name
        self.origin = origin
        self.nearest = nearest

    def __str__(self) -> str:
        meant = f"did you mean {self.nearest}?" if self.nearest else "it is none of the settings:"
        return (
            f"{self.origin}: there is no setting {self.name}; {meant} "
            "`batchmill config show` lists them all"
        )


class ConfigFileError(BatchmillError, ValueError):
    """The file of settings cannot be read; carries ``path`` and ``why``."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(path, why)
        self.path = path
        self.why = why

    def __str__(self) -> str:
        return f"{self.path} cannot be read: {self.why}. Put it right, or name another: --config"


Read = Callable[[Any], Any]
"""Makes a value of what was given, a text or what TOML knows; ValueError: it is not valid."""


@dataclass(frozen=True)
class Kind:
    """What a setting may be."""

    read: Read
    allowed: str
    metavar: str = "X"
    many: bool = False
    switch: bool = False
    path: bool = False


@dataclass(frozen=True)
class Setting:
    """One setting."""

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
class Chosen:
    """A value, and where it comes from."""

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


def _list(given: Any) -> tuple[str, ...]:
    if isinstance(given, str):
        given = [each.strip() for each in given.split(",")]
    if not isinstance(given, list | tuple):
        raise ValueError
    return tuple(_text(each) for each in given)


def _switch(given: Any) -> bool:
    known = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if isinstance(given, bool):
        return given
    return known[str(given).lower()]


def _whole(least: int, most: int) -> Kind:
    def read(given: Any) -> int:
        if isinstance(given, bool) or not isinstance(given, int | str):
            raise ValueError
        value = int(given)
        if not least <= value <= most:
            raise ValueError
        return value

    return Kind(read, f"a whole number from {least} to {most}", "N")


def _seconds(given: Any) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float | str):
        raise ValueError
    value = float(given)
    if not 0 <= value <= _DAY_S:  # also refuses nan
        raise ValueError
    return value


def _duration(given: Any) -> str:
    """As ``batchmill pipeline --dedup`` takes it; ``off`` for none."""
    text = _text(given)
    if text != "off" and not (text[:-1].isdecimal() and text[-1] in "smh"):
        raise ValueError
    return text


def _targets(given: Any) -> tuple[str, ...]:
    """Addresses of exporters' peers; in a text there is a space between two."""
    from batchmill.export import Target

    found = given.split() if isinstance(given, str) else given
    if not isinstance(found, list | tuple):
        raise ValueError
    return tuple(
        prometheus.check(_without_login(_text(each)))
        if prometheus.takes(_text(each))
        else str(Target.parse(_text(each)))
        for each in found
    )


def _without_login(to: str) -> str:
    # It would stand on the command line of the exporter, which everybody on this machine can see.
    if "@" in to:
        raise ValueError
    return to


def _topic(given: Any) -> str:
    (target,) = _targets([given])
    if not target.startswith("kafka://"):
        raise ValueError
    return target


def _spans_topic(given: Any) -> str:
    from batchmill.kafka import KafkaAddress

    return str(KafkaAddress.parse(_text(given)))


TEXT = Kind(_text, "a text that is not empty", "TEXT")
PATH = Kind(_text, "a path", "PATH", path=True)
PATHS = Kind(_list, "paths", "PATH", many=True, path=True)
NAMES = Kind(_list, "names", "NAME", many=True)
PAIRS = Kind(_list, "NAME=VALUE, or a list of them", "NAME=VALUE", many=True)
TARGETS = Kind(
    _targets,
    "otlp+grpc://host:port, otlp+http://host:port, kafka://host:port/topic, "
    f"{prometheus.ALLOWED}, without a login, or a list of them",
    "TARGET",
    many=True,
)
TARGET = Kind(_topic, "kafka://host:port/topic", "TARGET")
SPANS_TOPIC = Kind(
    _spans_topic, "kafka://host:port[,host:port]/topic, without a login: see kafka_config", "TOPIC"
)
SWITCH = Kind(_switch, "true or false", switch=True)
SECONDS = Kind(_seconds, f"a number of seconds from 0 to {_DAY_S:g}", "S")
DURATION = Kind(_duration, "a number with s, m or h, such as 10m, or off", "10m")
PORT = _whole(0, 65_535)
COUNT = _whole(1, 1_000_000)

SETTINGS: tuple[Setting, ...] = (
    Setting("home", PATH, "batchmill-data", "the folder of all state"),
    Setting("bind", TEXT, "127.0.0.1", "the address that ingest and the pages listen on"),
    Setting("http_port", PORT, 4318, "of OTLP/HTTP; 0: any that is free"),
    Setting("grpc_port", PORT, 4317, "of OTLP/gRPC; 0: any that is free"),
    Setting("token", TEXT, None, "the bearer token that others must show", secret=True),
    Setting("token_file", PATH, None, "a file with that token"),
    Setting("tls_cert", PATH, None, "the certificate that ingest and pages show"),
    Setting("tls_key", PATH, None, "its key"),
    Setting("tls_client_ca", PATH, None, "whose client certificates are taken (mTLS)"),
    Setting("insecure", SWITCH, False, "listen beyond this machine without token or mTLS"),
    Setting("max_body_mb", COUNT, None, "the largest body taken"),
    Setting("max_connections", COUNT, None, "for each of HTTP and gRPC"),
    Setting("request_timeout", SECONDS, None, "for a whole request to arrive"),
    Setting("linger", SECONDS, 0.2, "how long a segment waits for more spans"),
    Setting("segment_rows", COUNT, 50_000, "spans in a segment at most"),
    Setting("unread_warning_mb", COUNT, None, "WARNING at so much that is not read yet"),
    Setting("unread_critical_mb", COUNT, None, "CRITICAL, likewise: senders are told to wait"),
    Setting("unread_critical_plus_mb", COUNT, None, "CRITICAL_PLUS: without reading the body"),
    Setting("kafka", SPANS_TOPIC, None, "a topic of Kafka in the spool's place"),
    Setting("kafka_config", PATH, None, "a file for all who talk to Kafka: TLS, user, password"),
    Setting("oal", PATHS, (), "scripts of metrics, instead of the core metrics"),
    Setting("sources", NAMES, (), "modules with event types of your own"),
    Setting("master", TEXT, "local[*]", "where Spark runs"),
    Setting("conf", PAIRS, (), "settings of Spark"),
    Setting("trigger", SECONDS, 1.0, "how often the pipeline looks for segments"),
    Setting("dedup", DURATION, "10m", "how far back a span that comes twice is known; off"),
    Setting("apdex", PAIRS, (), "apdex thresholds, SERVICE=MS"),
    Setting("ttl_days", COUNT, 7, "how long metrics are kept"),
    Setting("top_n", COUNT, 50, "how many of the slowest statements are kept"),
    Setting("drain", SECONDS, 15.0, "how long the end waits for the rest to be read"),
    Setting("web", SWITCH, True, "serve pages to look at"),
    Setting("web_port", PORT, 8080, "of the pages; 0: any that is free"),
    Setting("export_to", TARGETS, (), "where exporters send what each commit changed"),
    Setting("export_traces", TARGET, None, "a Kafka topic that gets the traces, too"),
    Setting("export_logs", TARGET, None, "a Kafka topic that gets logs, which nobody else does"),
    Setting("export_headers", PAIRS, (), "what goes with each of their requests", secret=True),
    Setting("export_token", TEXT, None, "scrapers show it; remote write does, too", secret=True),
    Setting("export_outbox_mb", COUNT, 1024, "how much may wait for them before the oldest go"),
    Setting("log_mb", COUNT, 10, "how large a log may get before a new one is begun"),
    Setting("log_files", _whole(1, 100), 3, "how many logs of a process are kept"),
)
BY_NAME: Mapping[str, Setting] = {each.name: each for each in SETTINGS}


class Settings:
    """All values; ``settings["http_port"]`` is one."""

    def __init__(self, chosen: Mapping[str, Chosen]) -> None:
        self.chosen = chosen

    def __getitem__(self, name: str) -> Any:
        return self.chosen[name].value

    def path(self, name: str) -> Path | None:
        """A path, or None."""
        value = self[name]
        return None if value is None else Path(value)


def resolve(
    file: Mapping[str, Any] | None,
    file_name: str,
    environ: Mapping[str, str],
    flags: Mapping[str, Any],
    folder: Path = Path(),
) -> Settings:
    """All settings, from what was found; ``folder`` is the file's, from which its paths go."""
    chosen = {each.name: Chosen(each, each.default, "default") for each in SETTINGS}
    for name, given in _flat(file or {}):
        setting = _known(name, BY_NAME, file_name)
        value = _value(setting, given, f"{file_name}: {name}")
        chosen[name] = Chosen(setting, _from_folder(setting, value, folder), file_name)
    variables = {each.variable: each for each in SETTINGS}
    for name, text in environ.items():
        if name.startswith(PREFIX) and name not in OTHERS and text:
            setting = _known(name, variables, "environment")
            chosen[setting.name] = Chosen(setting, _value(setting, text, name), name)
    for name, given in flags.items():
        if given is not None:
            setting = BY_NAME[name]
            value = _value(setting, given, setting.flag)
            chosen[name] = Chosen(setting, value, setting.flag)
    return Settings(chosen)


def _flat(file: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The settings in a file; ``to`` in the table ``[export]`` is ``export_to``."""
    for name, given in file.items():
        # web is a setting, and so is web_port: `web = false` will do as well as a table `[web]`.
        table = name not in BY_NAME or any(each.startswith(f"{name}_") for each in BY_NAME)
        if isinstance(given, dict) and table:
            yield from ((f"{name}_{each}", value) for each, value in given.items())
        else:
            yield name, given


def add_options(parser: argparse.ArgumentParser) -> None:
    """A flag for each setting, and the file's."""
    parser.add_argument("--config", metavar="FILE", help=f"settings (default: ./{FILE}, if there)")
    for each in SETTINGS:
        plain = each.default in (None, ()) or isinstance(each.default, bool)
        shown = "" if plain else f" (default: {each.default})"
        options: dict[str, Any] = {"help": each.help + shown, "default": None}
        if each.kind.switch:
            options["action"] = argparse.BooleanOptionalAction if each.default else "store_true"
        else:
            options["metavar"] = each.kind.metavar
        if each.kind.many:
            options["action"] = "append"
        parser.add_argument(each.flag, dest=each.name, **options)


def load(given: argparse.Namespace, environ: Mapping[str, str] | None = None) -> Settings:
    """The settings that a command is to go by."""
    environ = os.environ if environ is None else environ
    named = given.config or environ.get(CONFIG_VARIABLE)
    path = Path(named or FILE)
    file = _read_file(path, must_be=bool(named))
    flags = {each.name: getattr(given, each.name, None) for each in SETTINGS}
    return resolve(file, str(path), environ, flags, path.parent)


def add_parser(commands: Any) -> None:
    """Add ``batchmill config``."""
    config = commands.add_parser("config", help="look at the settings of `batchmill run`")
    actions = config.add_subparsers(dest="action", required=True, metavar="action")
    show = actions.add_parser(
        "show",
        help="print each value and where it comes from",
        description="Print each setting, its value, and where that comes from: the command line, "
        f"the environment ({PREFIX}…), {FILE}, or the default. Secrets are hidden.",
    )
    add_options(show)
    show.add_argument("--json", action="store_true", help="one JSON object")


def run(given: argparse.Namespace) -> int:
    """Print the settings; the exit code."""
    try:
        settings = load(given)
    except BatchmillError as error:
        print(f"batchmill config: {error}", file=sys.stderr)
        return 2
    if given.json:
        shown = {
            name: {"value": each.shown(), "from": each.origin}
            for name, each in settings.chosen.items()
        }
        print(json.dumps(shown, ensure_ascii=False))
        return 0
    for line in lines(settings.chosen.values()):
        print(line)
    return 0


def lines(chosen: Iterable[Chosen]) -> list[str]:
    """Settings as text: name, value as TOML would have it, origin."""
    rows = [(each.setting.name, _toml(each.shown()), each.origin) for each in chosen]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return [f"{name:{widths[0]}}  {value:{widths[1]}}  {origin}" for name, value, origin in rows]


def _toml(value: Any) -> str:
    if value is None:
        return "-"
    if value == HIDDEN:
        return HIDDEN
    return json.dumps(value, ensure_ascii=False)


def _read_file(path: Path, *, must_be: bool) -> dict[str, Any] | None:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        if must_be:
            raise ConfigFileError(str(path), "there is no such file") from None
        return None
    except OSError as error:
        raise ConfigFileError(str(path), error.strerror or str(error)) from error
    except ValueError as error:  # no TOML, or no UTF-8
        raise ConfigFileError(str(path), str(error)) from error


def _known(name: str, names: Mapping[str, Setting], origin: str) -> Setting:
    if name in names:
        return names[name]
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    raise UnknownSettingError(name, origin, near[0] if near else None)


def _value(setting: Setting, given: Any, where: str) -> Any:
    try:
        return setting.kind.read(given)
    except (ValueError, KeyError):
        # A login has no place in an address, nor in what is said of it.
        hidden = setting.secret or isinstance(given, dict) or "@" in str(given)
        shown = HIDDEN if hidden else given
        raise ConfigError(where, shown, setting.kind.allowed) from None


def _from_folder(setting: Setting, value: Any, folder: Path) -> Any:
    if not setting.kind.path:
        return value
    if setting.kind.many:
        return tuple(str(folder / each) for each in value)
    return str(folder / value)
