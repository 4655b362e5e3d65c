"""``batchmill demo``: a simulated shop that sends real OpenTelemetry spans.

On standard output goes one line of JSON, the balance; all else goes to standard error.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import secrets
import signal
import socket
import sys
import time
from types import FrameType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from batchmill.demo.shop import LONGEST_S, plan

if TYPE_CHECKING:
    from batchmill.demo.sender import Sender

HTTP_ENDPOINT = "http://127.0.0.1:4318"
GRPC_ENDPOINT = "http://127.0.0.1:4317"
MOST_S = 86_400.0
MOST_PER_S = 10_000.0
CLOSING_PATIENCE_S = 10.0
"""How long is tried to bring the rest home after Ctrl-C."""
_LOOK_S = 0.1


def add_parser(commands: Any) -> None:
    """Declare the command."""
    demo = commands.add_parser(
        "demo",
        help="send the spans of a simulated shop to an OpenTelemetry receiver",
        description="Simulate a shop of eight services with databases, a cache and a queue, and "
        "send its spans with the OpenTelemetry SDK. Ends with one line of JSON: spans sent, "
        "acknowledged, failed. Ctrl-C ends it early, with the same balance. The exit code is 1 if "
        "any span was not acknowledged. A token goes into OTEL_EXPORTER_OTLP_HEADERS, as in any "
        "program with OpenTelemetry.",
    )
    demo.add_argument(
        "--endpoint",
        type=_endpoint,
        metavar="URL",
        help=f"of the receiver (default: {HTTP_ENDPOINT}, with --grpc {GRPC_ENDPOINT})",
    )
    demo.add_argument("--grpc", action="store_true", help="send by gRPC (default: HTTP)")
    length = demo.add_mutually_exclusive_group()
    length.add_argument(
        "--seconds",
        type=_number(MOST_S),
        default=60.0,
        metavar="S",
        help="how long visitors come (default: %(default)g)",
    )
    length.add_argument("--forever", action="store_true", help="until Ctrl-C")
    demo.add_argument(
        "--rate",
        type=_number(MOST_PER_S),
        default=20.0,
        metavar="N",
        help="requests per second on average, of about eight spans each (default: %(default)g)",
    )
    demo.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="for the same spans again, ids included; a receiver that drops duplicates takes them "
        "for such (default: a new one each time)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Send the shop's spans; 0 when all of them were acknowledged, else 1."""
    try:
        from batchmill.demo import exporter as shop_exporter_module
        from batchmill.demo import sender as shop_sender_module
        from batchmill.demo import spans as shop_spans_module

        endpoint = arguments.endpoint or (GRPC_ENDPOINT if arguments.grpc else HTTP_ENDPOINT)
        exporter, rejected = shop_exporter_module.make_exporter(endpoint, grpc=arguments.grpc)
    except ImportError as error:
        return _complain(
            f"it sends with the OpenTelemetry SDK, which could not be loaded ({error}).\n"
            "Install it with: pip install 'batchmill[demo]'"
        )
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return _complain("OTEL_SDK_DISABLED is true, so nothing would be sent. Unset it.")
    if refusal := _nobody_listens(endpoint):
        return _complain(
            f"nobody listens at {endpoint} ({refusal}).\n"
            "Start `batchmill run` first, or name another receiver with --endpoint."
        )
    seed = secrets.randbelow(10**9) if arguments.seed is None else arguments.seed
    seconds = None if arguments.forever else arguments.seconds
    _say(
        f"a shop of eight services, about {arguments.rate:g} requests/s, sends to {endpoint} "
        f"{'until Ctrl-C' if seconds is None else f'for {seconds:g} s'} (--seed {seed})"
    )
    with Stop() as stop, shop_sender_module.LastWords() as words:
        sender = shop_sender_module.Sender(
            exporter,
            rejected=rejected,
            trouble=lambda spans: _say(f"{spans} spans are to be sent again: {words.text}"),
        )
        shop = shop_spans_module.Shop(seed, sender)
        return _open(shop, sender, stop, words, (seed, arguments.rate, seconds))


def _open(
    shop: Any, sender: Sender, stop: Stop, words: Any, what: tuple[int, float, float | None]
) -> int:
    """Let visitors in until the end, then give account."""
    started = time.monotonic()
    # Visitors of the shop came a little before now, so that no span ends in the future.
    begin_ns = time.time_ns() - int(LONGEST_S * 1_000_000_000)
    requests, code = 0, 0
    try:
        for request in plan(*what):
            if not stop.sleep_until(started + request.offset_us / 1_000_000) or sender.given_up:
                break
            requests += 1
            shop.play(request, begin_ns)
        if what[2] is not None and not sender.given_up:
            stop.sleep_until(started + what[2])
        if stop.asked:
            _say("stopping; brings home what is on its way (Ctrl-C again leaves it)")
            sender.close(CLOSING_PATIENCE_S)
        else:
            sender.close()
    except KeyboardInterrupt:  # the second Ctrl-C
        sender.abandon()
        code = 130
    balance = sender.balance()
    if balance.failed:
        _say(f"{balance.failed} spans were not acknowledged; the last answer: {words.text}")
    print(
        json.dumps(
            {
                "sent": balance.sent,
                "acknowledged": balance.acknowledged,
                "failed": balance.failed,
                "requests": requests,
                "seconds": round(time.monotonic() - started, 3),
            }
        ),
        flush=True,
    )
    return code or (1 if balance.failed else 0)


class Stop:
    """While entered, the first Ctrl-C or SIGTERM is noted; the next one does what it always does.

    It only sets an attribute: a lock taken here could be one that the main thread holds.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def sleep_until(self, moment_s: float) -> bool:
        """Whether the moment came before anybody asked to stop."""
        while not self.asked and (left_s := moment_s - time.monotonic()) > 0:
            time.sleep(min(left_s, _LOOK_S))
        return not self.asked

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        self._restore()

    def _restore(self) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            before = signal.getsignal(number)
            if before is not signal.SIG_IGN:  # a shell's background job is not to be stopped
                self._before[number] = before
                signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()


def _nobody_listens(endpoint: str) -> str:
    """Why no connection can be made; nothing if one can."""
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
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # such as a port that is no number
        usable = False
    if not usable:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not valid: it must be a URL such as {HTTP_ENDPOINT}"
        )
    return text


def _number(most: float) -> Any:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 < value <= most:  # also refuses nan
            raise argparse.ArgumentTypeError(
                f"{text!r} is not valid: it must be a number above 0, up to {most:g}"
            )
        return value

    return parse


def _say(text: str) -> None:
    print(f"batchmill demo: {text}", file=sys.stderr, flush=True)


def _complain(text: str) -> int:
    _say(text)
    return 1
