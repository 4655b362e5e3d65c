"""``batchmill ingest``: the OTLP receivers, run from the command line."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchmill.cli.numbers import above_zero
from batchmill.cli.options import add_kafka_option, kafka_options
from batchmill.errors import BatchmillError

if TYPE_CHECKING:
    from batchmill.export import KafkaForwarder
    from batchmill.ingest import Receiver, ReceiverSettings
    from batchmill.kafka import KafkaSink
    from batchmill.spool import Spool

TOKEN_VARIABLE = "BATCHMILL_TOKEN"
_MANY_FILES = 65_536
_MIB = 2**20


def add_parser(commands: Any) -> None:
    """Add the command."""
    ingest = commands.add_parser(
        "ingest",
        help="receive spans from OpenTelemetry clients into a spool, or a topic of Kafka",
        description="Receive OTLP traces over HTTP (protobuf or JSON) and gRPC. A sender is "
        "answered once its spans are durable in the spool, or acknowledged by Kafka. Ctrl-C or "
        "SIGTERM ends it after the requests under way, a second Ctrl-C at once.",
    )
    whole, seconds = above_zero(int), above_zero(float)
    add = ingest.add_argument
    add("--home", default="batchmill-data", metavar="DIR", help="where spool and status live")
    add(
        "--to",
        metavar="ADDRESS",
        help="kafka://host:port[,host:port]/topic, instead of the spool in --home",
    )
    add_kafka_option(ingest)
    for each in ("traces", "logs"):
        stored = "once they are stored" if each == "traces" else "and nowhere else"
        add(
            f"--export-{each}",
            metavar="TARGET",
            help=f"kafka://host:port/topic: hand {each} on there, {stored}; never waits",
        )
    add("--bind", default="127.0.0.1", metavar="HOST", help="listen here (default: %(default)s)")
    add("--http-port", type=int, default=4318, metavar="P", help="default: %(default)s")
    add("--grpc-port", type=int, default=4317, metavar="P", help="default: %(default)s")
    add(
        "--token",
        metavar="T",
        help=f"senders must show it; better in a file, or in {TOKEN_VARIABLE}: others on this "
        "machine can see command lines",
    )
    add("--token-file", type=Path, metavar="FILE", help="a file with the token")
    add("--tls-cert", type=Path, metavar="FILE", help="the receiver's certificate, PEM")
    add("--tls-key", type=Path, metavar="FILE", help="its key, PEM")
    add("--tls-client-ca", type=Path, metavar="FILE", help="senders must show a certificate of it")
    add("--insecure", action="store_true", help="let everybody send who can reach --bind")
    add("--max-body-mb", type=whole, metavar="MB", help="the largest body taken")
    add("--max-connections", type=whole, metavar="N", help="for each of HTTP and gRPC")
    add("--request-timeout", type=seconds, metavar="S", help="for a whole request to arrive")
    add(
        "--linger", type=seconds, metavar="S", help="how long a segment, or message, waits for more"
    )
    add("--segment-rows", type=whole, metavar="N", help="spans in a segment at most")
    for level in ("warning", "critical", "critical-plus"):
        add(
            f"--unread-{level}-mb",
            type=whole,
            metavar="MB",
            help=f"{level.upper().replace('-', '_')} at so much that the pipeline has not read",
        )
    add("--verbose", action="store_true", help="say more")


def run(given: argparse.Namespace) -> int:
    """Run the command; the exit code."""
    level = logging.INFO if given.verbose else logging.WARNING
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=level)
    try:
        from batchmill.ingest import Limits, Receiver

        home = Path(given.home)
        settings = _settings(given)
        limits = Limits(**_given(max_body_bytes=_mib(given.max_body_mb)))
        _raise_file_limit()
        with _forwarders(given) as forwarders, _sink(given) as sink:
            receiver = Receiver(
                sink,
                settings,
                limits=limits,
                status_path=home / "run" / "ingest.json",
                forwarders=forwarders,
            )
            asyncio.run(_serve(receiver, given.to or str(home / "spool")))
    except (BatchmillError, OSError) as error:
        print(f"batchmill ingest: {error}", file=sys.stderr)
        return 1
    where = "topic" if given.to else "spool"
    print(f"ended: everything acknowledged is in the {where}", flush=True)
    return 0


@contextlib.contextmanager
def _forwarders(given: argparse.Namespace) -> Iterator[dict[str, KafkaForwarder]]:
    """Who gets traces and logs beside the sink; closed after that, when the last are durable."""
    targets = {"traces": given.export_traces, "logs": given.export_logs}
    made: dict[str, KafkaForwarder] = {}
    with contextlib.ExitStack() as stack:
        for signal_name, target in targets.items():
            if target is not None:
                from batchmill.export import KafkaForwarder, Target

                forwarder = KafkaForwarder(
                    Target.parse(target), signal=signal_name, options=kafka_options(given)
                )
                made[signal_name] = stack.enter_context(contextlib.closing(forwarder))
        yield made
    for signal_name, each in made.items():
        told = each.stats()
        line = f"{signal_name} handed on to {told['to']}: {told['sent']:,} of {told['offered']:,}"
        lost = "".join(f"; dropped {n:,}: {reason}" for reason, n in told["dropped"].items())
        print(line + lost, flush=True)


def _sink(given: argparse.Namespace) -> Spool | KafkaSink:
    """Where spans go."""
    if given.to is None:
        from batchmill.spool import Spool

        return Spool(Path(given.home) / "spool", **_spool_settings(given))
    from batchmill.kafka import KafkaAddress, KafkaSettings

    address = KafkaAddress.parse(given.to)
    settings = KafkaSettings(**_given(options=kafka_options(given), linger_s=given.linger))

    from batchmill.kafka import KafkaSink

    sink = KafkaSink(address, settings)
    try:
        sink.check()
    except BaseException:
        sink.close(timeout=0)
        raise
    return sink


async def _serve(receiver: Receiver, where: str) -> None:
    loop = asyncio.get_running_loop()
    asked: list[int] = []

    def note(number: int) -> None:
        if asked and number == signal.SIGINT:
            os.write(2, b"stopped at once: what was not acknowledged is sent again\n")
            os._exit(130)
        asked.append(number)
        receiver.stop()

    for each in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(each, note, each)

    def ready() -> None:
        scheme = "https" if receiver.settings.access.tls else "http"
        print(
            f"receiving OTLP traces at {scheme}://{receiver.http_address} (HTTP) and "
            f"{receiver.grpc_address} (gRPC) into {where}; Ctrl-C ends it",
            flush=True,
        )

    await receiver.serve(ready)


def _settings(given: argparse.Namespace) -> ReceiverSettings:
    from batchmill.http import Access
    from batchmill.ingest import ReceiverSettings

    access = Access(
        token=token_of(given),
        tls_cert=given.tls_cert,
        tls_key=given.tls_key,
        client_ca=given.tls_client_ca,
    )
    return ReceiverSettings(
        bind=given.bind,
        http_port=given.http_port,
        grpc_port=given.grpc_port,
        access=access,
        insecure=given.insecure,
        **_given(max_connections=given.max_connections, request_s=given.request_timeout),
    )


def _spool_settings(given: argparse.Namespace) -> dict[str, Any]:
    return _given(
        linger_s=given.linger,
        max_rows=given.segment_rows,
        unread_warning=_mib(given.unread_warning_mb),
        unread_critical=_mib(given.unread_critical_mb),
        unread_critical_plus=_mib(given.unread_critical_plus_mb),
    )


def token_of(given: argparse.Namespace) -> str | None:
    """The token on the command line, in a file, or in the environment."""
    if given.token is not None:
        return str(given.token)
    if given.token_file is not None:
        return str(given.token_file.read_text().strip())
    return os.environ.get(TOKEN_VARIABLE)


def _given(**settings: Any) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}


def _mib(count: int | None) -> int | None:
    return None if count is None else count * _MIB


def _raise_file_limit() -> None:
    """Connections are files: have room for all that are allowed."""
    try:
        import resource
    except ImportError:  # Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, _MANY_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
