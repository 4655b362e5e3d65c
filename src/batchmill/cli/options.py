"""Options and argument types that several commands share."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import hashlib
import importlib
import importlib.util
import math
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchmill.errors import BatchmillError, ConfigError
from batchmill.run import FILE, SETTINGS, TOKEN_VARIABLE, Home, RunSettings, load_settings

if TYPE_CHECKING:
    from batchmill.http import Access

SUFFIX = ".py"
_PAGE_AGAIN_S, _PAGE_AGAIN_MAX_S = 1.0, 60.0
"""How long to wait before the port of a page is tried again: at first, and at most."""


class SourcesError(BatchmillError, ImportError):
    """A module with event types cannot be imported."""

    module: str
    why: str
    template = (
        "--sources {module} cannot be imported: {why}. Give the dotted name of a module, such as "
        "shop.events, or the path of a .py file; modules are looked for where Python finds them "
        "and in the current folder"
    )


class Parser(argparse.ArgumentParser):
    """A parser whose errors suggest the command or the option that may have been meant."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            names = list(map(str, action.choices))
            what = action.metavar if isinstance(action.metavar, str) else "value"
            hint = suggestion(str(value), names)
            text = f"there is no {what} {value!r}{hint} (choose from {', '.join(names)})"
            raise argparse.ArgumentError(action if what == "value" else None, text)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does it; an option that does not exist gets a suggestion."""
        arguments, rest = self.parse_known_args(args, namespace)
        if rest:
            options = self._options_of(arguments)
            unknown = [f"{word}{suggestion(word.partition('=')[0], options)}" for word in rest]
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return arguments

    def _options_of(self, arguments: argparse.Namespace) -> list[str]:
        """The options of the commands that were given."""
        options = [option for option in self._option_string_actions if option.startswith("--")]
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                command = action.choices.get(getattr(arguments, action.dest, None) or "")
                if isinstance(command, Parser):
                    options += command._options_of(arguments)
        return options


def suggestion(word: str, names: Iterable[str]) -> str:
    """``"; did you mean status?"``: the nearest name, or those that begin with ``word``."""
    names = list(names)
    near = [name for name in names if len(word.lstrip("-")) and name.startswith(word)]
    near = near or difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def whole(least: int = 1) -> Callable[[str], int]:
    """An argument that is a whole number of at least that."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not valid: it must be a whole number, {least} or more"
            )
        return int(text)

    return parse


def mib(text: str) -> int:
    """An argument that is a whole number of MiB, at least 1; its value is in bytes."""
    return whole()(text) * 2**20


def number(most: float = math.inf, *, zero: bool = False) -> Callable[[str], float]:
    """An argument that is a number above 0, or from 0 on with ``zero``, up to ``most``."""
    allowed = f"a number {'from 0 on' if zero else 'above 0'}"
    allowed += "" if math.isinf(most) else f", up to {most:g}"

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        # Also refuses nan.
        if not (value >= 0 if zero else value > 0) or not value <= most or math.isinf(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not valid: it must be {allowed}")
        return value

    return parse


def pair(text: str) -> tuple[str, str]:
    """An argument that is ``NAME=VALUE``."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not valid: it must be NAME=VALUE")
    return name, value


def only_given(**values: Any) -> dict[str, Any]:
    """The arguments that are not None, so that the others keep their defaults."""
    return {name: value for name, value in values.items() if value is not None}


class Options:
    """Adds options to a parser; shorter to write than its ``add_argument``."""

    def __init__(self, parser: argparse._ActionsContainer) -> None:
        self._add = parser.add_argument

    def value(self, flag: str, metavar: str, text: str, **more: Any) -> None:
        """Add an option with a value; ``text`` is its help."""
        self._add(flag, metavar=metavar, help=text, **more)

    def values(self, flag: str, metavar: str, text: str, **more: Any) -> None:
        """Add an option that may be repeated; its value is a list."""
        self._add(flag, metavar=metavar, help=text, action="append", default=[], **more)

    def switch(self, flag: str, text: str) -> None:
        """Add an option without a value."""
        self._add(flag, help=text, action="store_true")


def add_settings_options(parser: argparse.ArgumentParser) -> None:
    """Add an option for each setting of a run, and ``--config``."""
    parser.add_argument("--config", metavar="FILE", help=f"settings (default: ./{FILE}, if there)")
    for setting in SETTINGS:
        plain = setting.default in (None, ()) or isinstance(setting.default, bool)
        shown = "" if plain else f" (default: {setting.default})"
        options: dict[str, Any] = {"help": setting.help + shown, "default": None}
        if setting.kind.switch:
            options["action"] = argparse.BooleanOptionalAction if setting.default else "store_true"
        else:
            options["metavar"] = setting.kind.metavar
        if setting.kind.many:
            options["action"] = "append"
        parser.add_argument(setting.flag, dest=setting.name, **options)


def settings_of(arguments: argparse.Namespace) -> RunSettings:
    """The settings of a run, by :func:`add_settings_options` or :func:`add_home_options`."""
    flags = {setting.name: getattr(arguments, setting.name, None) for setting in SETTINGS}
    return load_settings(flags, arguments.config)


def add_home_options(parser: argparse._ActionsContainer) -> None:
    """Add the options that name a run: ``--home``, or the settings file that has it."""
    add = Options(parser)
    add.value("--home", "PATH", "the run's home (default: as for `run`)")
    add.value("--config", "FILE", f"settings (default: ./{FILE})")


OTHER_RUN = "; --home names the folder of another run, --store a store"
"""What to do when there is no store where :func:`home_of` looks for it."""


def home_of(arguments: argparse.Namespace) -> Home:
    """The home folder of a run, by :func:`add_home_options`."""
    flags = {"home": arguments.home}
    return Home(Path(load_settings(flags, arguments.config)["home"]).absolute())


def add_access_options(parser: argparse.ArgumentParser, clients: str) -> None:
    """Add the options for who may connect to a server; ``clients`` are called that."""
    add = Options(parser)
    better = f"better use a file or {TOKEN_VARIABLE}: all users of this machine see command lines"
    add.value("--token", "T", f"{clients} must send this bearer token; {better}")
    add.value("--token-file", "FILE", "a file with the token", type=Path)
    add.value("--tls-cert", "FILE", "the server's certificate, PEM", type=Path)
    add.value("--tls-key", "FILE", "its key, PEM", type=Path)
    add.value("--tls-client-ca", "FILE", f"{clients} need a certificate of it", type=Path)
    add.switch("--insecure", "listen beyond this machine though anybody may connect")


def access_of(arguments: argparse.Namespace) -> Access:
    """Who may connect, by :func:`add_access_options`."""
    from batchmill.http import Access

    return Access(
        token=arguments.token
        if arguments.token is not None
        else token_of(arguments, TOKEN_VARIABLE),
        tls_cert=arguments.tls_cert,
        tls_key=arguments.tls_key,
        client_ca=arguments.tls_client_ca,
    )


def token_of(arguments: argparse.Namespace, variable: str) -> str | None:
    """The token in ``--token-file``, else in the environment."""
    return _read_token(arguments.token_file, variable)


def _read_token(file: Path | None, variable: str) -> str | None:
    if file is None:
        return os.environ.get(variable)
    token = file.read_text().strip()
    if not token:
        raise ConfigError("token_file", str(file), "a file with a token: it is empty")
    return token


def add_metrics_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a page with the queues of the process, for Prometheus."""
    add = Options(parser.add_argument_group("page for Prometheus"))
    text = "serve the queues, batchers and flows of this process; 0: any free port"
    add.value("--metrics-port", "P", text, type=whole(0))
    add.value("--metrics-bind", "HOST", "default: %(default)s", default="127.0.0.1")
    text = f"a file with the bearer token that scrapers must send, else {TOKEN_VARIABLE}"
    add.value("--metrics-token-file", "FILE", text, type=Path)
    add.value("--metrics-tls-cert", "FILE", "the page's certificate, PEM", type=Path)
    add.value("--metrics-tls-key", "FILE", "its key, PEM", type=Path)
    add.value("--metrics-tls-client-ca", "FILE", "scrapers need a certificate of it", type=Path)
    add.switch("--metrics-insecure", "let anybody scrape who can reach the address")


@contextlib.contextmanager
def metrics_page(arguments: argparse.Namespace) -> Iterator[None]:
    """Serve the page of :func:`add_metrics_options`, if there is to be one.

    Where the port is in use, the command does without it, reports that, and tries again.
    """
    if arguments.metrics_port is None:
        yield
        return
    from batchmill.export import PrometheusSettings, TelemetryServer
    from batchmill.http import Access
    from batchmill.process_stats import ProcessStats

    token = _read_token(arguments.metrics_token_file, TOKEN_VARIABLE)
    access = Access(
        token=token,
        tls_cert=arguments.metrics_tls_cert,
        tls_key=arguments.metrics_tls_key,
        client_ca=arguments.metrics_tls_client_ca,
    )
    settings = PrometheusSettings(
        bind=arguments.metrics_bind,
        port=arguments.metrics_port,
        access=access,
        insecure=arguments.metrics_insecure,
    )
    with contextlib.ExitStack() as stack:

        def serve() -> bool:
            try:
                server = stack.enter_context(TelemetryServer(settings))
            except ConfigError as error:
                if not isinstance(error.__cause__, OSError):
                    raise
                why = f"no page for Prometheus: {error} (set --metrics-port)"
                if why != ProcessStats.page_fault:
                    print(why, file=sys.stderr, flush=True)
                ProcessStats.page_fault = why
                return False
            ProcessStats.page_fault = ""
            print(f"queues of this process for Prometheus: {server.address}", flush=True)
            return True

        ended = threading.Event()

        def serve_later() -> None:
            pause_s = _PAGE_AGAIN_S
            while not ended.wait(pause_s) and not serve():
                pause_s = min(2 * pause_s, _PAGE_AGAIN_MAX_S)

        thread = threading.Thread(target=serve_later, name="batchmill-page", daemon=True)
        if not serve():
            thread.start()
        try:
            yield
        finally:
            ended.set()
            if thread.ident is not None:
                thread.join()
            ProcessStats.page_fault = ""


def add_kafka_option(parser: argparse._ActionsContainer) -> None:
    """Add ``--kafka-config``."""
    text = "settings of librdkafka for kafka://…, NAME=VALUE a line: TLS, user and password"
    Options(parser).value("--kafka-config", "FILE", text, type=Path)


def kafka_options(arguments: argparse.Namespace) -> dict[str, str]:
    """The settings in the file of :func:`add_kafka_option`; empty if there is none."""
    if arguments.kafka_config is None:
        return {}
    from batchmill.kafka import read_options

    return read_options(arguments.kafka_config)


def add_sources_option(parser: argparse._ActionsContainer) -> None:
    """Add ``--sources``."""
    text = "a module, or a .py file, with @source classes: event types of your own; may be repeated"
    Options(parser).values("--sources", "MODULE", text)


def import_sources(modules: Iterable[str]) -> None:
    """Import modules by dotted name or by path, so that scripts may use their event types."""
    for module in modules:
        try:
            if module.endswith(SUFFIX) or "/" in module or "\\" in module:
                _import_file(module)
            else:
                _add_to_path(Path.cwd())
                importlib.import_module(module)
        except Exception as error:
            # The module is the user's own code: it may raise anything.
            raise SourcesError(module, _why(error)) from error


def _import_file(text: str) -> None:
    file = Path(text).resolve()
    # By a name of its own: two files may have the same name, and one may be given twice.
    name = f"batchmill_sources_{hashlib.sha256(str(file).encode()).hexdigest()[:16]}"
    if name in sys.modules:
        return
    if not file.is_file():
        raise FileNotFoundError("there is no such file")
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"its name does not end with {SUFFIX}")
    _add_to_path(file.parent)
    # Before it runs: annotations are looked up in the module of their class.
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def _add_to_path(folder: Path) -> None:
    # Last, so that no file there replaces a module of Python.
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _why(error: Exception) -> str:
    """An error in one line, with the place in the user's code."""
    message = " ".join(str(error).split())
    if isinstance(error, FileNotFoundError) and error.errno is None:
        return message
    what = f"{type(error).__name__}: {message}" if message else type(error).__name__
    here = Path(__file__).parent.parent
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<")
        and here not in Path(frame.filename).parents
        and Path(frame.filename).parent.name != "importlib"
    ]
    return f"{what} ({frames[-1].filename}:{frames[-1].lineno})" if frames else what
