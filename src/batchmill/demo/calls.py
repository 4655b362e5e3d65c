"""Calls of the shop's services: to each other, to databases, to the cache, through the queue.

Attributes are those of OpenTelemetry's semantic conventions. The services ``cart`` and ``shipping``
still write the older ones, as some in every system do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from batchmill.demo.steps import Draft, Value

OLD_CONVENTIONS = frozenset({"cart", "shipping"})
HTTP_PORT = 8080
GRPC_PORT = 9090
BROKER = ("kafka.shop", 9092)
CACHE = ("redis.shop", 6379)

OK, UNAVAILABLE, FAILED_PRECONDITION = 0, 14, 9
_SERVER_FAULTS = frozenset({2, 4, 12, 13, UNAVAILABLE, 15})
"""The gRPC codes that are also a failure of the server; others are the caller's."""

Answer = Callable[[Draft], int]
"""Does the work of a server step, and returns the HTTP status or the gRPC code."""


@dataclass(frozen=True, slots=True)
class Database:
    """A database."""

    system: str
    address: str
    port: int
    name: str


def receive_http(served: Draft, method: str, route: str, path: str, answer: Answer) -> int:
    """Do the work of a server step, with the attributes of an HTTP server; the status."""
    served.name = f"{method} {route}"
    if served.service in OLD_CONVENTIONS:
        served.attributes |= {"http.method": method, "http.route": route, "http.target": path}
    else:
        served.attributes |= {
            "http.request.method": method,
            "http.route": route,
            "url.path": path,
            "url.scheme": "http",
            "network.protocol.version": "1.1",
        }
    status = answer(served)
    _set_status(served, status)
    if status >= 500:
        served.fail(str(status), f"answered with {status}")
    return status


def call_http(caller: Draft, to: str, method: str, route: str, path: str, answer: Answer) -> int:
    """Call another service of the shop; the status it answered with."""
    call = caller.child("CLIENT", f"{method} {route}")
    _set_http_target(call, method, f"http://{to}.shop:{HTTP_PORT}{path}", f"{to}.shop", HTTP_PORT)
    call.work(0.4)  # on the wire
    served = call.child("SERVER", "", service=to)
    status = receive_http(served, method, route, path, answer)
    call.wait_for(served)
    call.work(0.3)
    _close_http(caller, call, status)
    return status


def call_outside(caller: Draft, host: str, method: str, path: str, answer: Answer) -> int:
    """Call a server that sends no spans; the status, or 0 if no answer came in time."""
    call = caller.child("CLIENT", f"{method} {path}")
    _set_http_target(call, method, f"https://{host}{path}", host, 443)
    _close_http(caller, call, status := answer(call))
    return status


def _set_http_target(call: Draft, method: str, url: str, host: str, port: int) -> None:
    old = call.service in OLD_CONVENTIONS
    call.attributes |= {
        ("http.method" if old else "http.request.method"): method,
        ("http.url" if old else "url.full"): url,
        "server.address": host,
        "server.port": port,
    }


def _close_http(caller: Draft, call: Draft, status: int) -> None:
    if status:
        _set_status(call, status)
    if not status:
        call.fail("timeout", "no answer in time")
    elif status >= 400:
        call.fail(str(status), f"answered with {status}")
    caller.wait_for(call)


def _set_status(step: Draft, status: int) -> None:
    old = step.service in OLD_CONVENTIONS
    step.attributes["http.status_code" if old else "http.response.status_code"] = status


def call_grpc(caller: Draft, to: str, service: str, method: str, answer: Answer) -> int:
    """Call another service of the shop by gRPC; the code it answered with."""
    name = f"{service}/{method}"
    about = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": method}
    call = caller.child("CLIENT", name)
    call.attributes |= {**about, "server.address": f"{to}.shop", "server.port": GRPC_PORT}
    call.work(0.3)
    served = call.child("SERVER", name, service=to)
    served.attributes |= about
    code = answer(served)
    call.wait_for(served)
    call.work(0.2)
    for step in (served, call):
        step.attributes["rpc.grpc.status_code"] = code
    if code in _SERVER_FAULTS:
        served.fail(str(code), f"ended with code {code}")
    if code != OK:
        call.fail(str(code), f"ended with code {code}")
    caller.wait_for(call)
    return code


def run_statement(
    caller: Draft,
    database: Database,
    text: str,
    table: str,
    usual_ms: float,
    *,
    slow: float = 0.0,
    broken: float = 0.0,
) -> bool:
    """Run a statement; whether it succeeded. ``slow`` and ``broken`` are the chances of it."""
    operation = text.split(" ", 1)[0]
    query = caller.child("CLIENT", f"{operation} {table}")
    query.attributes |= {"server.address": database.address, "server.port": database.port}
    if caller.service in OLD_CONVENTIONS:
        query.attributes |= {
            "db.system": database.system,
            "db.name": database.name,
            "db.operation": operation,
            "db.sql.table": table,
            "db.statement": text,
        }
    else:
        query.attributes |= {
            "db.system.name": database.system,
            "db.namespace": database.name,
            "db.operation.name": operation,
            "db.collection.name": table,
            "db.query.text": text,
        }
    if caller.chance.random() < slow:
        query.work_between(230, 800)
    else:
        query.work(usual_ms)
    succeeded = caller.chance.random() >= broken
    if not succeeded:
        query.fail("40P01", "deadlock detected")
    caller.wait_for(query)
    return succeeded


def call_cache(caller: Draft, command: str, key: str) -> None:
    """Run a command of the cache; one in a hundred is slow."""
    call = caller.child("CLIENT", command)
    system, operation, text = (
        ("db.system", "db.operation", "db.statement")
        if caller.service in OLD_CONVENTIONS
        else ("db.system.name", "db.operation.name", "db.query.text")
    )
    call.attributes |= {
        system: "redis",
        operation: command,
        text: f"{command} {key}",
        "server.address": CACHE[0],
        "server.port": CACHE[1],
    }
    if caller.chance.random() < 0.01:
        call.work_between(12, 45)
    else:
        call.work(0.7)
    caller.wait_for(call)


def publish(
    caller: Draft, topic: str, consumers: Iterable[tuple[str, Callable[[Draft], None]]]
) -> None:
    """Send a message; each consumer handles it a little later, while the caller continues."""
    about: dict[str, Value] = {
        "messaging.system": "kafka",
        "messaging.destination.name": topic,
        "server.address": BROKER[0],
        "server.port": BROKER[1],
    }
    sent = caller.child("PRODUCER", f"send {topic}")
    sent.attributes |= {**about, "messaging.operation.name": "send"}
    sent.attributes["messaging.operation.type"] = "send"
    sent.work(1.8)
    caller.wait_for(sent)
    for service, handle in consumers:
        received = sent.child("CONSUMER", f"process {topic}", service=service)
        received.attributes |= {**about, "messaging.operation.name": "process"}
        received.attributes["messaging.operation.type"] = "process"
        received.attributes["messaging.consumer.group.name"] = service
        received.begin_later(25)
        handle(received)
