"""``batchmill export`` to ``prometheus://…`` and ``remote+http://…``: minutes of a store.

Unlike other targets these read the store, and need no outbox.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from batchmill.cli.numbers import above_zero
from batchmill.errors import ConfigError
from batchmill.extras import require_extra
from batchmill.run.home import write_json
from batchmill.run.supervisor import Signals
from batchmill.store import RetryPolicy, Store, StoreMissingError, open_store
from batchmill.telemetry import ProcessStats

if TYPE_CHECKING:
    from batchmill.export import PrometheusServer, RemoteWriter, RemoteWriteStats, SeriesLimits

TOKEN_VARIABLE = "BATCHMILL_EXPORT_TOKEN"
PULLED = "prometheus"
PUSHED = ("remote+http", "remote+https")
ALLOWED = "prometheus://host:port, remote+http://host:port/path or remote+https://host:port/path"
STATUS_S = 1.0

_SCRAPE_STORE_S = 3.0
"""How long a scrape tries to read the store, before it is answered 503."""


def takes(to: str) -> bool:
    """Whether an address is one of these."""
    return to.partition("://")[0] in (PULLED, *PUSHED)


def check(to: str) -> str:
    """The address, if it can be one; raises :class:`ConfigError`."""
    from batchmill.export import remote_address

    if to.partition("://")[0] == PULLED:
        _address(to)
    else:
        remote_address(to)
    return to


def check_extra(to: str) -> None:
    """Raise if what a target takes is not installed."""
    if to.partition("://")[0] in PUSHED:
        require_extra("remote write", "export", "pyarrow", "google.protobuf")
    else:
        require_extra("the page for Prometheus", "export", "starlette", "uvicorn")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what both ways may be told."""
    whole, seconds = above_zero(int), above_zero(float)
    add = parser.add_argument_group("Prometheus").add_argument
    add("--max-series", type=whole, metavar="N", help="of a minute at most (default: 10000)")
    add("--max-series-per-metric", type=whole, metavar="N", help="default: 2000")
    add(
        "--token-file",
        type=Path,
        metavar="FILE",
        help=f"a file with the token, else {TOKEN_VARIABLE}: scrapers must show it; remote write "
        "shows it to the receiver",
    )
    add("--tls-cert", type=Path, metavar="FILE", help="prometheus://: the page's certificate, PEM")
    add("--tls-key", type=Path, metavar="FILE", help="its key, PEM")
    add("--insecure", action="store_true", help="let everybody scrape who can reach the address")
    add(
        "--max-age",
        type=seconds,
        metavar="S",
        help="prometheus://: leave values out once their minute is over for longer (default: 300)",
    )
    add(
        "--position",
        type=Path,
        metavar="FILE",
        help="remote+http://: how far it has come (default: a file beside the checkpoint)",
    )
    add("--catch-up", type=whole, metavar="MINUTES", help="sent after a pause (default: 60)")
    add(
        "--late",
        type=int,
        metavar="MINUTES",
        help="looked at again for late rows (default: 3); Prometheus takes those only with an "
        "out_of_order_time_window",
    )


def run(given: argparse.Namespace, headers: Mapping[str, str]) -> int:
    """Serve or write to one target until told to stop; the exit code."""
    for name in ("once", "forget"):
        if getattr(given, name):
            raise ConfigError(f"--{name}", given.to, "left out: it is for targets with an outbox")
    check_extra(given.to)
    check(given.to)
    with Signals() as signals:
        if given.to.partition("://")[0] == PULLED:
            return _scraped(given, signals)
        return _written(given, headers, signals)


def _scraped(given: argparse.Namespace, signals: Signals) -> int:
    from batchmill.export import PageSettings, PrometheusServer, PrometheusSettings
    from batchmill.http import Access

    host, port = _address(given.to)
    settings = PrometheusSettings(
        bind=host,
        access=Access(token=_token(given), tls_cert=given.tls_cert, tls_key=given.tls_key),
        insecure=given.insecure,
        page=PageSettings(limits=_limits(given), **_given(max_age_s=given.max_age)),
        **_given(port=port),
    )
    policy = RetryPolicy(give_up_after_s=_SCRAPE_STORE_S)
    with PrometheusServer(
        lambda: open_store(given.store, retry=policy, create=False), settings
    ) as server:
        print(f"serving {server.address} for Prometheus; Ctrl-C ends it", flush=True)
        telling = _Telling(given, given.to)
        while not signals.count:
            telling.write(_served(server))
            signals.wait(STATUS_S)
        telling.write(_served(server) | {"state": "ended"})
    return 0


def _written(given: argparse.Namespace, headers: Mapping[str, str], signals: Signals) -> int:
    from batchmill.export import RemoteWriter, RemoteWriteSettings, remote_address

    settings = RemoteWriteSettings(
        limits=_limits(given),
        **_given(catch_up_minutes=given.catch_up, late_minutes=given.late, timeout_s=given.timeout),
    )
    shown = remote_address(given.to)
    telling = _Telling(given, shown)
    store = _find(given.store, signals, telling)
    if store is None:
        return 0
    position = given.position or _position(Path(given.checkpoint), shown)
    with store:
        with RemoteWriter(
            store, given.to, position, settings, token=_token(given), headers=headers
        ) as writer:
            print(f"writing to {shown}; Ctrl-C ends it", flush=True)
            while not signals.count:
                telling.write(_sent(writer))
                signals.wait(STATUS_S)
        telling.write(_sent(writer) | {"state": "ended"})
        print(summary(writer.stats()), flush=True)
    return 0


def summary(stats: RemoteWriteStats) -> str:
    """What became of the samples, in one line."""
    parts = [f"{stats.sent:,} samples sent, of {stats.minutes:,} minutes"]
    for count, what in (
        *((n, f"refused: {reason}") for reason, n in stats.refused_for.items()),
        (stats.unsent, "not sent: they come again at the next start"),
        (stats.late, "changed by late rows"),
        (stats.dropped, "series over the limit"),
        (stats.minutes_skipped, "minutes skipped"),
        (stats.retries, "retries"),
    ):
        if count:
            parts.append(f"{count:,} {what}")
    return "ended: " + ", ".join(parts)


def _find(url: str, signals: Signals, telling: _Telling) -> Store | None:
    """The store, once it is there; None: somebody asked for the end before."""
    told = False
    while not signals.count:
        try:
            return open_store(url, create=False)
        except StoreMissingError as error:
            if not told:
                print(f"waiting for the pipeline: {error}", flush=True)
                told = True
        telling.write({"state": "waiting for the pipeline"})
        signals.wait(STATUS_S / 2)
    return None


class _Telling:
    """Says in a file how an exporter is doing, for ``batchmill run`` and ``batchmill status``."""

    def __init__(self, given: argparse.Namespace, target: str) -> None:
        self._path: Path | None = given.status
        self._always = {
            "name": given.name or target,
            "pid": os.getpid(),
            "target": target,
            "started": time.time(),
            "state": "exporting",
            # Nothing waits in the outbox for it.
            "waiting": {"files": 0},
        }
        self._process = ProcessStats()

    def write(self, facts: Mapping[str, Any]) -> None:
        """Say it; a disk that is full stops nobody."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                told = {**self._always, **facts, "queues": self._process.queues()}
                write_json(self._path, told | {"written_at": time.time()})


def _served(server: PrometheusServer) -> dict[str, Any]:
    answers = server.answers()
    return {"scrapes": answers.get("ok", 0), "answers": answers}


def _sent(writer: RemoteWriter) -> dict[str, Any]:
    stats = writer.stats()
    dropped = {
        **{f"refused: {reason}": n for reason, n in stats.refused_for.items()},
        "over the limit of series": stats.dropped,
    }
    return {
        "position": stats.minute,
        "queued": stats.waiting,
        "sent_values": stats.sent,
        "requests": sum(stats.requests.values()),
        "retries": {name: n for name, n in stats.requests.items() if not name.startswith("HTTP 2")},
        "dropped": {reason: n for reason, n in dropped.items() if n},
        "minutes_skipped": stats.minutes_skipped,
        "faults": dict(stats.faults),
        "failing": stats.failing,
        "failing_s": round(stats.failing_s, 1),
    }


def _position(checkpoint: Path, shown: str) -> Path:
    """Where a writer notes how far it has come: beside the checkpoint, by its receiver."""
    mark = hashlib.sha256(shown.encode()).hexdigest()[:8]
    return checkpoint.absolute().parent / f"remote-write-{mark}.json"


def _limits(given: argparse.Namespace) -> SeriesLimits:
    from batchmill.export import SeriesLimits

    return SeriesLimits(
        **_given(max_series=given.max_series, max_series_per_metric=given.max_series_per_metric)
    )


def _address(to: str) -> tuple[str, int | None]:
    cut = urlsplit(to)
    try:
        port = cut.port
    except ValueError:
        port = -1
    strange = cut.path not in ("", "/", "/metrics") or cut.query or "@" in cut.netloc
    if not cut.hostname or port == -1 or strange:
        raise ConfigError("to", to, "such as prometheus://127.0.0.1:9464")
    return cut.hostname, port


def _token(given: argparse.Namespace) -> str | None:
    if given.token_file is None:
        return os.environ.get(TOKEN_VARIABLE) or None
    token = str(given.token_file.read_text().strip())
    if not token:
        raise ConfigError("token_file", str(given.token_file), "a file with a token: it is empty")
    return token


def _given(**settings: Any) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}
