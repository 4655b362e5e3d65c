"""``batchmill ingest``: receives spans over OTLP."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchmill.cli.options import (
    Options,
    access_of,
    add_access_options,
    add_kafka_option,
    kafka_options,
    mib,
    number,
    only_given,
    whole,
)
from batchmill.errors import BatchmillError
from batchmill.logs import configure_logs
from batchmill.run import serve_until_signal

if TYPE_CHECKING:
    from batchmill.export import KafkaForwarder
    from batchmill.ingest import Limits, Place, Receiver, ReceiverSettings
    from batchmill.kafka import KafkaSink
    from batchmill.run import Receivers
    from batchmill.spool import Spool

_MANY_FILES = 65_536


def add_parser(commands: Any) -> None:
    """Add the command."""
    ingest = commands.add_parser(
        "ingest",
        help="receive spans from OpenTelemetry clients into a spool or a topic of Kafka",
        description="Receive OTLP traces over HTTP (protobuf or JSON) and gRPC. A sender is "
        "answered once its spans are durable in the spool, or acknowledged by Kafka. Ctrl-C or "
        "SIGTERM ends it after the requests under way, a second Ctrl-C at once.",
    )
    add = Options(ingest)
    add.value("--home", "DIR", "the folder of spool and status", default="batchmill-data")
    text = "kafka://host:port[,host:port]/topic, instead of the spool in --home"
    add.value("--to", "ADDRESS", text)
    add_kafka_option(ingest)
    text = "kafka://host:port/topic: forward {} there, {}; never blocks"
    add.value("--export-traces", "TARGET", text.format("traces", "once they are stored"))
    add.value("--export-logs", "TARGET", text.format("logs", "and nowhere else"))
    text = "what requests with metrics get: success, or an error (default: discard)"
    add.value("--metrics", "discard|refuse", text)
    text = "the same for logs (default: forward with --export-logs, else discard)"
    add.value("--logs", "discard|refuse|forward", text)
    text = "requests that may wait for such a topic (default: 20000); beyond it they are dropped"
    add.value("--export-forward-buffer", "N", text, type=whole(), default=20_000)
    text = "the same by size (default: 64)"
    add.value("--export-forward-mb", "MB", text, type=mib, default=64 * 2**20)
    add.value("--bind", "HOST", "listen here (default: %(default)s)", default="127.0.0.1")
    add.value("--http-port", "P", "default: %(default)s", type=int, default=4318)
    add.value("--grpc-port", "P", "default: %(default)s", type=int, default=4317)
    text = "share the work among N processes, for more than one core (default: %(default)s)"
    add.value("--processes", "N", text, type=whole(), default=1)
    ingest.add_argument("--worker", help=argparse.SUPPRESS)  # what a process of several gets
    add_access_options(ingest, "senders")
    add.value("--max-body-mb", "MB", "the largest request body accepted", type=mib)
    add.value("--max-connections", "N", "for HTTP and gRPC each", type=whole())
    add.value("--request-timeout", "S", "within which a request must arrive", type=number())
    add.value("--linger", "S", "how long a segment or message waits for more", type=number())
    add.value("--segment-rows", "N", "the most spans in a segment", type=whole())
    text = "leave events and status messages of spans out of the spool: only kept spans need them"
    add.switch("--no-span-events", text)
    for level in ("warning", "critical", "critical-plus"):
        text = f"unread data at which {level.upper().replace('-', '_')} begins"
        add.value(f"--unread-{level}-mb", "MB", text, type=mib)
    add.switch("--verbose", "log more")


def run(arguments: argparse.Namespace) -> int:
    """Receive until a signal; the exit code."""
    configure_logs(verbose=arguments.verbose)
    try:
        from batchmill.ingest import Limits, Place, check_shares

        settings = _settings(arguments)
        limits = Limits(**only_given(max_body_bytes=arguments.max_body_mb))
        _raise_file_limit()
        if arguments.worker is not None:
            return _work(arguments, settings, limits, Place.parse(arguments.worker))
        if arguments.processes > 1:
            check_shares(settings, limits, arguments.processes)
            forwarded = _run_workers(arguments, settings)
        else:
            forwarded = _receive(arguments, settings, limits)
    except (BatchmillError, OSError) as error:
        print(f"batchmill ingest: {error}", file=sys.stderr)
        return 1
    for name, stats in forwarded.items():
        line = f"{name} forwarded to {stats['to']}: {stats['sent']:,} of {stats['offered']:,}"
        lost = "".join(f"; dropped {n:,}: {reason}" for reason, n in stats["dropped"].items())
        print(line + lost, flush=True)
    where = "topic" if arguments.to else "spool"
    print(f"ended: everything acknowledged is in the {where}", flush=True)
    return 0


def _receive(
    arguments: argparse.Namespace, settings: ReceiverSettings, limits: Limits
) -> dict[str, Mapping[str, Any]]:
    """Receive in this process; what became of the requests to forward."""
    from batchmill.ingest import Receiver

    with _forwarders(arguments) as forwarders, _sink(arguments) as sink:
        receiver = Receiver(
            sink,
            settings,
            limits=limits,
            status_path=_status_path(arguments),
            forwarders=forwarders,
        )
        asyncio.run(_serve(receiver, arguments))
    return {name: forwarder.stats() for name, forwarder in forwarders.items()}


def _run_workers(
    arguments: argparse.Namespace, settings: ReceiverSettings
) -> dict[str, Mapping[str, Any]]:
    """Receive in several processes."""
    from batchmill.run import Receivers

    receivers = Receivers(
        arguments.processes, settings, sys.argv[1:], status_path=_status_path(arguments)
    )
    asyncio.run(_serve(receivers, arguments))
    forwarded: dict[str, Mapping[str, Any]] = receivers.status()["forwarded"]
    return forwarded


def _work(
    arguments: argparse.Namespace, settings: ReceiverSettings, limits: Limits, place: Place
) -> int:
    """Receive as one of several processes."""
    from batchmill.ingest import ParentLink, Receiver

    with contextlib.closing(ParentLink(place)) as parent:
        with _forwarders(arguments, place) as forwarders, _sink(arguments, place) as sink:
            receiver = Receiver(
                sink, place.settings(settings), limits=limits, forwarders=forwarders, parent=parent
            )
            asyncio.run(serve_until_signal(receiver, lambda: None))
        receiver.report()  # with what the forwarders have sent at last
    return 0


def _status_path(arguments: argparse.Namespace) -> Path:
    return Path(arguments.home) / "run" / "ingest.json"


@contextlib.contextmanager
def _forwarders(
    arguments: argparse.Namespace, place: Place | None = None
) -> Iterator[dict[str, KafkaForwarder]]:
    """Forwarders of traces and logs; closed after the sink, when the last spans are durable."""
    forwarders: dict[str, KafkaForwarder] = {}
    with contextlib.ExitStack() as stack:
        for name, target in (("traces", arguments.export_traces), ("logs", arguments.export_logs)):
            if target is not None:
                from batchmill.export import KafkaForwarder, Target

                share = place.share if place is not None else int
                forwarder = KafkaForwarder(
                    Target.parse(target),
                    signal=name,
                    options=kafka_options(arguments),
                    buffer_size=max(1, share(arguments.export_forward_buffer)),
                    max_bytes=max(1, share(arguments.export_forward_mb)),
                )
                forwarders[name] = stack.enter_context(contextlib.closing(forwarder))
        yield forwarders


def _sink(arguments: argparse.Namespace, place: Place | None = None) -> Spool | KafkaSink:
    """Where spans go; with ``place``, for one of several processes."""
    if arguments.to is None:
        from batchmill.spool import Spool

        return Spool(
            Path(arguments.home) / "spool",
            span_events=not arguments.no_span_events,
            **_capacity(place),
            **only_given(
                linger_s=arguments.linger,
                max_rows=arguments.segment_rows,
                unread_warning=arguments.unread_warning_mb,
                unread_critical=arguments.unread_critical_mb,
                unread_critical_plus=arguments.unread_critical_plus_mb,
            ),
        )
    from batchmill.kafka import KafkaAddress, KafkaSettings

    address = KafkaAddress.parse(arguments.to)
    settings = KafkaSettings(
        options=kafka_options(arguments),
        **_capacity(place),
        **only_given(linger_s=arguments.linger),
    )

    from batchmill.kafka import KafkaSink  # only now: its extra may be missing

    sink = KafkaSink(address, settings)
    try:
        sink.check()
    except BaseException:
        sink.close(timeout=0)
        raise
    return sink


def _capacity(place: Place | None) -> dict[str, Any]:
    """The part of a sink's memory that one of several processes may use."""
    if place is None:
        return {}
    from batchmill.spool import SinkSettings

    whole = SinkSettings()
    return {name: place.share(getattr(whole, name)) for name in ("capacity_rows", "capacity_bytes")}


async def _serve(receiver: Receiver | Receivers, arguments: argparse.Namespace) -> None:
    def ready() -> None:
        scheme = "https" if receiver.settings.access.tls else "http"
        where = arguments.to or str(Path(arguments.home) / "spool")
        shared = f", {arguments.processes} processes" if arguments.processes > 1 else ""
        print(
            f"receiving OTLP traces at {scheme}://{receiver.http_address} (HTTP) and "
            f"{receiver.grpc_address} (gRPC) into {where}{shared}; Ctrl-C ends it",
            flush=True,
        )

    last_words = b"stopped at once: what was not acknowledged is sent again\n"
    await serve_until_signal(receiver, ready, last_words)


def _settings(arguments: argparse.Namespace) -> ReceiverSettings:
    from batchmill.ingest import ReceiverSettings

    return ReceiverSettings(
        bind=arguments.bind,
        http_port=arguments.http_port,
        grpc_port=arguments.grpc_port,
        access=access_of(arguments),
        insecure=arguments.insecure,
        **only_given(
            max_connections=arguments.max_connections,
            request_s=arguments.request_timeout,
            metrics=arguments.metrics,
            logs=arguments.logs,
        ),
    )


def _raise_file_limit() -> None:
    """Allow as many open files as connections are allowed."""
    try:
        import resource
    except ImportError:  # Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, _MANY_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
