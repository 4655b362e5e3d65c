"""``batchmill export``: what each commit changed, sent to somebody else."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchmill.cli import prometheus
from batchmill.cli.options import add_kafka_option, kafka_options
from batchmill.errors import BatchmillError, ConfigError
from batchmill.extras import require_extra
from batchmill.run.home import Home, write_json
from batchmill.run.supervisor import Signals
from batchmill.store import RetryPolicy, Store, StoreError, StoreMissingError, open_store
from batchmill.telemetry import ProcessStats

if TYPE_CHECKING:
    from batchmill.export import Exporter, ExporterSettings, Target
    from batchmill.outbox import Outbox

HEADERS_VARIABLE = "BATCHMILL_EXPORT_HEADERS"
STATUS_S = 1.0
_PATIENCE = RetryPolicy(give_up_after_s=5.0)
_NEEDED = {"kafka": "confluent_kafka", "otlp+grpc": "grpc", "otlp+grpcs": "grpc"}


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "export",
        help="send what each commit changes to a collector or to Kafka",
        description="Tail the outbox of a pipeline that runs with --outbox, and send the values "
        "that each commit changed: what it added and the total, at least once. A peer that is "
        "slow or dead holds up nobody: what cannot be sent waits in the outbox. Ctrl-C or SIGTERM "
        "ends it after what is in hand, a second Ctrl-C at once. To Prometheus goes what the store "
        "holds, without an outbox: the newest complete minute as a page to scrape, or every one "
        "by remote write.",
    )
    add = parser.add_argument
    add(
        "--to",
        required=True,
        metavar="TARGET",
        help="otlp+grpc://host:port, otlp+grpcs://…, otlp+http://…, otlp+https://…, "
        f"kafka://host:port/topic, {prometheus.ALLOWED}",
    )
    add("--store", default="sqlite:///metrics.db", metavar="URL", help="default: %(default)s")
    add("--checkpoint", default="checkpoint", metavar="DIR", help="the pipeline's")
    add("--name", help="what the store knows it by (default: the target)")
    add(
        "--header",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help=f"goes with each request; better in {HEADERS_VARIABLE}, with commas between them: "
        "others on this machine can see command lines",
    )
    add_kafka_option(parser)
    add("--timeout", type=float, metavar="S", help="for an answer (default: 10)")
    add("--once", action="store_true", help="send what is there, then end")
    add("--forget", action="store_true", help="let nothing wait for it any more, and end")
    add("--status", type=Path, metavar="FILE", help="tell there each second how it is doing")
    add("--verbose", action="store_true", help="say more")
    prometheus.add_options(parser)


def run(given: argparse.Namespace) -> int:
    """Run the command; the exit code."""
    level = logging.INFO if given.verbose else logging.WARNING
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=level)
    try:
        from batchmill.export import Exporter, Target, forget_exporter, open_sender

        if prometheus.takes(given.to):
            return prometheus.run(given, _headers(given))
        target = Target.parse(given.to)
        name = given.name or str(target)
        settings = _settings(given)
        check_extra(str(target))
        with Signals() as signals:
            telling = _Telling(given.status, name, target)
            found = _find(given, signals, telling)
            if found is None:
                return 0
            outbox, store = found
            with store:
                if given.forget:
                    forget_exporter(store, outbox, name)
                    print(f"nothing waits for {name} any more", flush=True)
                    return 0
                exporter = Exporter(
                    store=store,
                    outbox=outbox,
                    sender=open_sender(target, settings),
                    name=name,
                    settings=settings,
                )
                return _export(exporter, signals, telling, once=given.once)
    except (BatchmillError, OSError) as error:
        print(f"batchmill export: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


def check_extra(target: str) -> None:
    """Raise if what a target takes is not installed."""
    if prometheus.takes(target):
        prometheus.check_extra(target)
        return
    scheme = target.partition("://")[0]
    sender = (_NEEDED[scheme],) if scheme in _NEEDED else ()
    require_extra(
        "exporting", "export", "pyarrow", "google.protobuf", "opentelemetry.proto", *sender
    )


def forget_others(home: Home, prefix: str, wanted: Collection[str]) -> list[str]:
    """Forget the exporters of a run that are not ``wanted`` any more; their names.

    One that still runs, left over from a run that was killed, is forgotten the next time.
    """
    from batchmill.export import ExporterInUseError, forget_exporter
    from batchmill.outbox import NoOutboxError, Outbox

    gone: list[str] = []
    try:
        outbox = Outbox.of(home.checkpoint)
        with open_store(home.store_url, retry=_PATIENCE, create=False) as store:
            known = [each.exporter for each in store.exporters(outbox.place)]
            for each in known:
                if each.startswith(prefix) and each not in wanted:
                    with contextlib.suppress(ExporterInUseError):
                        forget_exporter(store, outbox, each)
                        gone.append(each)
    except (NoOutboxError, StoreMissingError, ImportError):
        pass
    return gone


def _settings(given: argparse.Namespace) -> ExporterSettings:
    from batchmill.export import ExporterSettings

    more = {} if given.timeout is None else {"timeout_s": given.timeout}
    return ExporterSettings(headers=_headers(given), kafka_options=kafka_options(given), **more)


def _headers(given: argparse.Namespace) -> dict[str, str]:
    found = [each for each in os.environ.get(HEADERS_VARIABLE, "").split(",") if each]
    headers = {}
    for each in [*found, *given.header]:
        name, equals, value = each.partition("=")
        if not (name.strip() and equals):
            raise ConfigError("header", "…", "NAME=VALUE")
        headers[name.strip()] = value.strip()
    return headers


def _find(
    given: argparse.Namespace, signals: Signals, telling: _Telling
) -> tuple[Outbox, Store] | None:
    """The outbox and its store, once there are both; None: somebody asked for the end before."""
    from batchmill.outbox import NoOutboxError, Outbox

    told = False
    while not signals.count:
        try:
            outbox = Outbox.of(Path(given.checkpoint))
            return outbox, open_store(given.store, retry=_PATIENCE, create=False)
        except (NoOutboxError, StoreMissingError) as error:
            if given.once or given.forget:
                raise
            if not told:
                print(f"waiting for the pipeline: {error}", flush=True)
                told = True
        telling.write(None)
        signals.wait(0.5)
    return None


def _export(exporter: Exporter, signals: Signals, telling: _Telling, *, once: bool) -> int:
    failed: list[BaseException] = []

    def work() -> None:
        try:
            exporter.run(once=once)
        except BaseException as error:  # noqa: BLE001 - raised again where it is heard
            failed.append(error)

    thread = threading.Thread(target=work, name="batchmill-export", daemon=True)
    thread.start()
    print(f"exporting to {telling.target} as {exporter.name!r}; Ctrl-C ends it", flush=True)
    asked = False
    while thread.is_alive():
        telling.write(exporter)
        signals.wait(0.1)
        if signals.count and not asked:
            asked = True
            exporter.stop()
        if signals.count > 1:
            os.write(2, b"stopped at once: what was not acknowledged is sent again\n")
            os._exit(130)
    thread.join()
    telling.write(exporter, last=True)
    if failed:
        raise failed[0]
    print("ended: started again, it goes on where it was", flush=True)
    return 0


class _Telling:
    """Says once a second, in a file, how an exporter is doing."""

    def __init__(self, path: Path | None, name: str, target: Target) -> None:
        self.target = target
        self._path = path
        self._name = name
        self._due_s = 0.0
        self._started = time.time()
        self._process = ProcessStats()

    def write(self, exporter: Exporter | None, *, last: bool = False) -> None:
        """Say it, if it is time; a disk that is full stops nobody."""
        if self._path is None or (time.monotonic() < self._due_s and not last):
            return
        self._due_s = time.monotonic() + STATUS_S
        content: dict[str, Any] = {
            "name": self._name,
            "pid": os.getpid(),
            "target": str(self.target),
            "started": self._started,
            "written_at": time.time(),
            "state": "waiting for the pipeline" if exporter is None else "exporting",
        }
        with contextlib.suppress(OSError, StoreError):
            if exporter is not None:
                stats = exporter.stats()
                content |= {
                    "state": "ended" if last else "exporting",
                    "position": stats.position,
                    "waiting": {
                        "files": stats.waiting.files,
                        "rows": stats.waiting.rows,
                        "bytes": stats.waiting.bytes,
                        "oldest_ms": stats.waiting.oldest_ms,
                    },
                    "queued": stats.queued,
                    "sent_values": stats.sent,
                    "requests": stats.requests,
                    "retries": dict(stats.retries),
                    "dropped": dict(stats.dropped),
                    "refused_points": stats.refused_points,
                    "failing": stats.failing,
                    "failing_s": round(stats.failing_s, 1),
                    "queues": self._process.queues(),
                }
            write_json(self._path, content)
