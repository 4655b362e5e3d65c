"""``batchmill demo``: sends the spans of a simulated shop.

Standard output gets one line of JSON, the counts; everything else goes to standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import socket
import sys
import time
from typing import Any
from urllib.parse import urlsplit

from batchmill.cli.options import Options, number
from batchmill.demo import LONGEST_S, Stop, incidents, plan, play
from batchmill.errors import MissingExtraError
from batchmill.wording import count_of

HTTP_ENDPOINT = "http://127.0.0.1:4318"
GRPC_ENDPOINT = "http://127.0.0.1:4317"
MOST_S = 86_400.0
MOST_PER_S = 10_000.0


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "demo",
        help="send the spans of a simulated shop to an OpenTelemetry receiver",
        description="Simulate a shop of eight services with databases, a cache and a queue, and "
        "send its spans with the OpenTelemetry SDK. Ends with one line of JSON: spans sent, "
        "acknowledged, failed. Ctrl-C ends it early, with the same line. The exit code is 1 if "
        "any span was not acknowledged. A token goes into OTEL_EXPORTER_OTLP_HEADERS, as in any "
        "program with OpenTelemetry.",
    )
    add = Options(parser)
    text = f"of the receiver (default: {HTTP_ENDPOINT}, with --grpc {GRPC_ENDPOINT})"
    add.value("--endpoint", "URL", text, type=_endpoint)
    add.switch("--grpc", "send by gRPC (default: HTTP)")
    length = Options(parser.add_mutually_exclusive_group())
    text = "how long visitors come (default: %(default)g)"
    length.value("--seconds", "S", text, type=number(MOST_S), default=60.0)
    length.switch("--forever", "until Ctrl-C")
    text = "requests per second on average, of about eight spans each (default: %(default)g)"
    add.value("--rate", "N", text, type=number(MOST_PER_S), default=20.0)
    text = "let the catalogue's database fail for whole minutes: two of fifteen, or the first one"
    add.switch("--incidents", f"{text} of a run of less than four")
    text = "for the same spans again, ids included; a receiver that drops duplicates drops them"
    add.value("--seed", "N", f"{text} (default: a new one each time)", type=int)


def run(arguments: argparse.Namespace) -> int:
    """Send the shop's spans; 0 when all of them were acknowledged, else 1."""
    endpoint = arguments.endpoint or (GRPC_ENDPOINT if arguments.grpc else HTTP_ENDPOINT)
    try:
        from batchmill.demo import LastWords, Sender, Shop, make_exporter

        exporter, rejected = make_exporter(endpoint, grpc=arguments.grpc)
    except MissingExtraError as error:
        return _fail(str(error))
    except ImportError as error:
        return _fail(str(MissingExtraError("the demo", "demo", str(error))))
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return _fail("OTEL_SDK_DISABLED is true, so nothing would be sent. Unset it.")
    if refusal := _connection_error(endpoint):
        return _fail(
            f"nothing listens at {endpoint} ({refusal}).\n"
            "Start `batchmill run` first, or name another receiver with --endpoint."
        )
    seed = secrets.randbelow(10**9) if arguments.seed is None else arguments.seed
    seconds = None if arguments.forever else arguments.seconds
    _say(
        f"a shop of eight services, about {arguments.rate:g} requests/s, sends to {endpoint} "
        f"{'until Ctrl-C' if seconds is None else f'for {seconds:g} s'} (--seed {seed})"
    )
    # The visits happen a little before now.
    begin_s = time.time() - LONGEST_S
    trouble = incidents(begin_s, seconds) if arguments.incidents else lambda offset_s: False
    with Stop() as stop, LastWords() as words:
        sender = Sender(
            exporter,
            rejected=rejected,
            on_retry=lambda spans: _say(f"sending {count_of(spans, 'span')} again: {words.text}"),
        )
        played = play(
            Shop(seed, sender),
            sender,
            plan(seed, arguments.rate, seconds, trouble),
            stop,
            seconds=seconds,
            on_stop=lambda: _say("stopping after sending the rest (Ctrl-C again stops at once)"),
        )
        counts = sender.counts()
        if counts.failed:
            failed = count_of(counts.failed, "span was", "spans were")
            _say(f"{failed} not acknowledged; the last answer: {words.text}")
    content = {
        "sent": counts.sent,
        "acknowledged": counts.acknowledged,
        "failed": counts.failed,
        "requests": played.requests,
        "seconds": round(played.seconds, 3),
    }
    print(json.dumps(content), flush=True)
    if played.abandoned:
        return 130
    return 1 if counts.failed else 0


def _connection_error(endpoint: str) -> str:
    """Why no connection can be made; empty if one can."""
    parts = urlsplit(endpoint)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname or "", port), timeout=5).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _endpoint(text: str) -> str:
    try:
        parts = urlsplit(text)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # such as a port that is not a number
        valid = False
    if not valid:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not valid: it must be a URL such as {HTTP_ENDPOINT}"
        )
    return text


def _say(text: str) -> None:
    print(f"batchmill demo: {text}", file=sys.stderr, flush=True)


def _fail(text: str) -> int:
    _say(text)
    return 1
