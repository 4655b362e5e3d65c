"""``batchmill export``: sends values to a collector, to Kafka or to Prometheus.

Collectors and Kafka get what each commit changed, from the outbox. Prometheus gets complete minutes
from the store, and needs no outbox.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from batchmill.cli.options import (
    Options,
    add_home_options,
    add_kafka_option,
    add_metrics_options,
    home_of,
    kafka_options,
    metrics_page,
    number,
    only_given,
    token_of,
    whole,
)
from batchmill.errors import BatchmillError, ConfigError
from batchmill.export import (
    PROMETHEUS_ADDRESSES,
    check_address,
    is_scraped,
    page_address,
    reads_store,
    require_exporter,
)
from batchmill.logs import configure_logs
from batchmill.process_stats import ProcessStats
from batchmill.run import EXPORT_HEADERS_VARIABLE, EXPORT_TOKEN_VARIABLE, Signals, StatusFile
from batchmill.store import RetryPolicy, Store, StoreError, StoreMissingError, open_store
from batchmill.wording import count_of

if TYPE_CHECKING:
    from batchmill.export import (
        Exporter,
        PrometheusServer,
        RemoteWriter,
        RemoteWriteStats,
        SeriesLimits,
    )
    from batchmill.outbox import Outbox

T = TypeVar("T")

STATUS_S = 1.0
WAITING = "waiting for the pipeline"
_SENDING = ("buffer", "batch", "poll", "timeout", "retry_max", "drain")
_SCRAPE_PATIENCE = RetryPolicy(give_up_after_s=3.0)
"""How long a scrape tries to read the store, before it is answered 503."""


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "export",
        help="send what each commit changes to a collector, to Kafka or to Prometheus",
        description="Read the outbox of a pipeline that runs with --outbox, and send the values "
        "that each commit changed: what it added and the total, at least once. A peer that is slow "
        "or down delays nothing else: what cannot be sent waits in the outbox. Ctrl-C or SIGTERM "
        "ends it after the requests under way, a second Ctrl-C at once. Prometheus gets what the "
        "store has, without an outbox: the newest complete minute as a page to scrape, or every "
        "minute by remote write.",
    )
    add = Options(parser)
    outbox_targets = "otlp+grpc://host:port, otlp+grpcs://…, otlp+http://…, otlp+https://…, "
    targets = f"{outbox_targets}kafka://host:port/topic, {PROMETHEUS_ADDRESSES}"
    add.value("--to", "TARGET", targets, required=True)
    add.value("--store", "URL", "the store (default: that of --home)")
    text = "the pipeline's (default: that of --home; with --store, ./checkpoint)"
    add.value("--checkpoint", "DIR", text)
    add_home_options(parser)
    add.value("--name", "NAME", "its name in the store (default: the target)")
    better = f"better in {EXPORT_HEADERS_VARIABLE}, with commas between them: all users of this "
    text = f"sent with each request; {better}machine see command lines"
    add.values("--header", "NAME=VALUE", text)
    add_kafka_option(parser)
    add.switch("--once", "send what is there, then end")
    add.switch("--forget", "remove the exporter: nothing waits for it any more")
    add.value("--status", "FILE", "report there each second how it is doing", type=Path)
    add.switch("--verbose", "log more")
    group = parser.add_argument_group("Sending", "not for prometheus://, whose page is scraped")
    _add_sending_options(Options(group))
    _add_prometheus_options(Options(parser.add_argument_group("Prometheus")))
    add_metrics_options(parser)


def _add_sending_options(add: Options) -> None:
    add.value("--buffer", "N", "values in memory at most (default: 20000)", type=whole())
    add.value("--batch", "N", "values in a request at most (default: 2000)", type=whole())
    text = "how often to look for new values (default: 0.5, remote write 1)"
    add.value("--poll", "S", text, type=number())
    add.value("--timeout", "S", "for an answer (default: 10, remote write 30)", type=number())
    text = "the longest wait between two tries (default: 15, remote write 5)"
    add.value("--retry-max", "S", text, type=number())
    text = "how long to send what is in memory after a signal (default: 5)"
    add.value("--drain", "S", text, type=number())


def _add_prometheus_options(add: Options) -> None:
    add.value("--max-series", "N", "the most in a minute (default: 10000)", type=whole())
    add.value("--max-series-per-metric", "N", "default: 2000", type=whole())
    text = f"a file with the bearer token, else {EXPORT_TOKEN_VARIABLE}: scrapers must send it; "
    add.value("--token-file", "FILE", f"{text}remote write sends it to the receiver", type=Path)
    add.value("--tls-cert", "FILE", "prometheus://: the page's certificate, PEM", type=Path)
    add.value("--tls-key", "FILE", "its key, PEM", type=Path)
    add.value("--tls-client-ca", "FILE", "scrapers need a certificate of it", type=Path)
    add.switch("--insecure", "let anybody scrape who can reach the address")
    text = "prometheus://: leave values out once their minute is over for longer (default: 300)"
    add.value("--max-age", "S", text, type=number())
    text = "prometheus://: the folder of kept spans; examples of them are exemplars on the page"
    add.value("--traces", "DIR", text, type=Path)
    text = "remote+http://: notes the last minute sent (default: a file beside the checkpoint)"
    add.value("--position", "FILE", text, type=Path)
    add.value("--catch-up", "MINUTES", "sent after a pause (default: 60)", type=whole())
    text = "read again for late rows (default: 3); Prometheus accepts those only with an "
    add.value("--late", "MINUTES", f"{text}out_of_order_time_window", type=int)


def run(arguments: argparse.Namespace) -> int:
    """Export until a signal, or until all is sent with ``--once``; the exit code."""
    configure_logs(verbose=arguments.verbose)
    try:
        _find_run(arguments)
        headers = _headers(arguments)
        from_store = reads_store(arguments.to)
        for name in ("once", "forget") if from_store else ():
            if getattr(arguments, name):
                allowed = "left out: it is for targets with an outbox"
                raise ConfigError(f"--{name}", arguments.to, allowed)
        if from_store:
            require_exporter(arguments.to)
        target = check_address(arguments.to)
        for name in _SENDING if is_scraped(target) else ():
            if getattr(arguments, name) is not None:
                allowed = "left out: a page that is scraped sends nothing"
                raise ConfigError(f"--{name.replace('_', '-')}", arguments.to, allowed)
        with Signals() as signals:
            if is_scraped(target):  # that page has the queues of this process, too
                return _serve_page(arguments, signals)
            with metrics_page(arguments):
                if from_store:
                    return _write_remote(arguments, headers, signals)
                return _send_changes(arguments, target, headers, signals)
    except (BatchmillError, OSError) as error:
        print(f"batchmill export: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


def _find_run(arguments: argparse.Namespace) -> None:
    """Fill in the store and the checkpoint of a run, unless a store was named."""
    checkpoint = Path("checkpoint")
    if arguments.store is None:
        home = home_of(arguments)
        arguments.store, checkpoint = home.store_url, home.checkpoint
    if arguments.checkpoint is None:
        arguments.checkpoint = str(checkpoint)


def _headers(arguments: argparse.Namespace) -> dict[str, str]:
    headers = {}
    for text in [*os.environ.get(EXPORT_HEADERS_VARIABLE, "").split(","), *arguments.header]:
        name, equals, value = text.partition("=")
        if not text:
            continue
        if not (name.strip() and equals):
            raise ConfigError("header", "…", "NAME=VALUE")
        headers[name.strip()] = value.strip()
    return headers


def await_pipeline(
    find: Callable[[], T], status: StatusFile, signals: Signals, *, wait: bool = True
) -> T | None:
    """What ``find`` returns once the pipeline has made it; None: a signal came first."""
    from batchmill.outbox import NoOutboxError

    reported = False
    while not signals.count:
        try:
            return find()
        except (NoOutboxError, StoreMissingError) as error:
            if not wait:
                raise
            if not reported:
                print(f"{WAITING}: {error}", flush=True)
                reported = True
        status.write({"state": WAITING})
        signals.wait(STATUS_S / 2)
    return None


def _send_changes(
    arguments: argparse.Namespace, target: str, headers: Mapping[str, str], signals: Signals
) -> int:
    """Send what is in the outbox."""
    from batchmill.export import Exporter, ExporterSettings, Target, forget_exporter, open_sender
    from batchmill.outbox import Outbox

    name = arguments.name or target
    settings = ExporterSettings(
        headers=headers,
        kafka_options=kafka_options(arguments),
        **only_given(
            buffer_size=arguments.buffer,
            max_batch=arguments.batch,
            poll_s=arguments.poll,
            timeout_s=arguments.timeout,
            max_ms=_ms(arguments.retry_max),
            drain_s=arguments.drain,
        ),
    )
    require_exporter(target)
    status = StatusFile(arguments.status, name, target=target)

    def find() -> tuple[Outbox, Store]:
        outbox = Outbox.of(Path(arguments.checkpoint))
        return outbox, open_store(arguments.store, create=False)

    parts = await_pipeline(find, status, signals, wait=not (arguments.once or arguments.forget))
    if parts is None:
        return 0
    outbox, store = parts
    with store:
        if arguments.forget:
            forget_exporter(store, outbox, name)
            print(f"removed {name}: nothing waits for it any more", flush=True)
            return 0
        exporter = Exporter(
            store=store,
            outbox=outbox,
            sender=open_sender(Target.parse(target), settings),
            name=name,
            settings=settings,
        )
        print(f"exporting to {target} as {name!r}; Ctrl-C ends it", flush=True)
        _run_exporter(exporter, status if arguments.status else None, signals, once=arguments.once)
    print("ended: the next run continues from here", flush=True)
    return 0


def _run_exporter(
    exporter: Exporter, status: StatusFile | None, signals: Signals, *, once: bool
) -> None:
    """Run an exporter on a thread until a signal, and report on it."""
    failed: list[BaseException] = []

    def work() -> None:
        try:
            exporter.run(once=once)
        except BaseException as error:  # noqa: BLE001 - raised again by the main thread
            failed.append(error)

    process = ProcessStats()

    def report(state: str) -> None:
        with contextlib.suppress(StoreError):
            if status is not None:
                stats = {**_exporter_report(exporter), **process.report()}
                status.write({"state": state, **stats})

    thread = threading.Thread(target=work, name="batchmill-export", daemon=True)
    thread.start()
    stopping, due_s = False, 0.0
    while thread.is_alive():
        if time.monotonic() >= due_s:
            due_s = time.monotonic() + STATUS_S
            report("exporting")
        signals.wait(0.1)
        if signals.count and not stopping:
            stopping = True
            exporter.stop()
        if signals.count > 1:
            os.write(2, b"stopped at once: what was not acknowledged is sent again\n")
            os._exit(130)
    thread.join()
    report("ended")
    if failed:
        raise failed[0]


def _exporter_report(exporter: Exporter) -> dict[str, Any]:
    stats = exporter.stats()
    return {
        "position": stats.position,
        "waiting": asdict(stats.waiting),
        "queued": stats.queued,
        "sent_values": stats.sent,
        "requests": stats.requests,
        "retries": dict(stats.retries),
        "dropped": dict(stats.dropped),
        "refused_points": stats.refused_points,
        "failing": stats.failing,
        "failing_s": round(stats.failing_s, 1),
    }


def _serve_page(arguments: argparse.Namespace, signals: Signals) -> int:
    """Serve a page for Prometheus to scrape."""
    from batchmill.export import PageSettings, PrometheusServer, PrometheusSettings
    from batchmill.http import Access

    host, port = page_address(arguments.to)
    token = token_of(arguments, EXPORT_TOKEN_VARIABLE) or None
    settings = PrometheusSettings(
        bind=host,
        access=Access(
            token=token,
            tls_cert=arguments.tls_cert,
            tls_key=arguments.tls_key,
            client_ca=arguments.tls_client_ca,
        ),
        insecure=arguments.insecure,
        page=PageSettings(limits=_limits(arguments), **only_given(max_age_s=arguments.max_age)),
        **only_given(port=port),
    )
    with PrometheusServer(
        lambda: open_store(arguments.store, retry=_SCRAPE_PATIENCE, create=False),
        settings,
        traces=arguments.traces,
    ) as server:
        print(f"serving {server.address} for Prometheus; Ctrl-C ends it", flush=True)
        status = _status_file(arguments, arguments.to)
        _report_until_signal(lambda: _page_report(server), status, signals)
        status.write({**_page_report(server), "state": "ended"})
    return 0


def _write_remote(
    arguments: argparse.Namespace, headers: Mapping[str, str], signals: Signals
) -> int:
    """Send complete minutes by remote write."""
    from batchmill.export import RemoteWriter, RemoteWriteSettings, remote_address

    settings = RemoteWriteSettings(
        limits=_limits(arguments),
        **only_given(
            catch_up_minutes=arguments.catch_up,
            late_minutes=arguments.late,
            buffer_samples=arguments.buffer,
            max_samples=arguments.batch,
            poll_s=arguments.poll,
            timeout_s=arguments.timeout,
            max_ms=_ms(arguments.retry_max),
            close_timeout_s=arguments.drain,
        ),
    )
    shown = remote_address(arguments.to)
    token = token_of(arguments, EXPORT_TOKEN_VARIABLE) or None
    status = _status_file(arguments, shown)
    store = await_pipeline(lambda: open_store(arguments.store, create=False), status, signals)
    if store is None:
        return 0
    position = arguments.position or _position(Path(arguments.checkpoint), shown)
    with store:
        with RemoteWriter(
            store, arguments.to, position, settings, token=token, headers=headers
        ) as writer:
            print(f"writing to {shown}; Ctrl-C ends it", flush=True)
            _report_until_signal(lambda: _writer_report(writer), status, signals)
        # Only now are the counts final.
        status.write({**_writer_report(writer), "state": "ended"})
        print(summary(writer.stats()), flush=True)
    return 0


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000


def _status_file(arguments: argparse.Namespace, target: str) -> StatusFile:
    # Nothing waits in the outbox for these targets.
    fixed: dict[str, Any] = {"target": target, "state": "exporting", "waiting": {"files": 0}}
    return StatusFile(arguments.status, arguments.name or target, **fixed)


def _report_until_signal(
    report: Callable[[], dict[str, Any]], status: StatusFile, signals: Signals
) -> None:
    process = ProcessStats()
    while not signals.count:
        status.write({**report(), **process.report()})
        signals.wait(STATUS_S)


def summary(stats: RemoteWriteStats) -> str:
    """What became of the samples, in one line."""
    parts = [f"{count_of(stats.sent, 'sample')} sent, of {count_of(stats.minutes, 'minute')}"]
    parts += [f"{n:,} refused: {reason}" for reason, n in stats.refused_for.items() if n]
    for count, text in (
        (stats.unsent, f"{stats.unsent:,} not sent: the next run sends them"),
        (stats.late, f"{stats.late:,} changed by late rows"),
        (stats.dropped, f"{stats.dropped:,} series over the limit"),
        (stats.minutes_skipped, f"{count_of(stats.minutes_skipped, 'minute')} skipped"),
        (stats.retries, count_of(stats.retries, "retry", "retries")),
    ):
        if count:
            parts.append(text)
    return "ended: " + ", ".join(parts)


def _page_report(server: PrometheusServer) -> dict[str, Any]:
    answers = server.answers()
    return {"scrapes": answers.get("ok", 0), "answers": answers}


def _writer_report(writer: RemoteWriter) -> dict[str, Any]:
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
    """The file in which remote write notes the last minute sent to a receiver."""
    mark = hashlib.sha256(shown.encode()).hexdigest()[:8]
    return checkpoint.absolute().parent / f"remote-write-{mark}.json"


def _limits(arguments: argparse.Namespace) -> SeriesLimits:
    from batchmill.export import SeriesLimits

    return SeriesLimits(
        **only_given(
            max_series=arguments.max_series, max_series_per_metric=arguments.max_series_per_metric
        )
    )
