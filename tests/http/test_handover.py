"""Several processes that serve one port: connections handed over, ports reserved."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import pytest

from batchmill.errors import ConfigError
from batchmill.http import Giver, Taker, handover_pair, listen, reserve
from tests.kit.processes import free_port

LOOPBACK = "127.0.0.1"


@contextlib.contextmanager
def ends() -> Iterator[tuple[Giver, Taker]]:
    """Both ends of a way for connections."""
    giving, taking = handover_pair()
    giver, taker = Giver(giving), Taker(taking)
    with contextlib.closing(giver), contextlib.closing(taker):
        yield giver, taker


def sharing(port: int) -> socket.socket:
    """A listener as gRPC's with ``grpc.so_reuseport``."""
    listener = socket.socket()
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        listener.setsockopt(socket.SOL_SOCKET, option, 1)
    listener.bind((LOOPBACK, port))
    listener.listen()
    return listener


def test_a_connection_is_handed_over() -> None:
    """The other end can use it, and tells when it has ended."""
    near, far = socket.socketpair()
    with ends() as (giver, taker), near, far:
        assert giver.give(far)
        far.close()
        with asyncio.run(taker.accept()) as taken:
            taken.sendall(b"hello")
            assert near.recv(10) == b"hello"
            giver.update()
            assert giver.open == 1
        taker.released()
        giver.update()
        assert giver.open == 0


def test_accept_waits_for_a_connection() -> None:
    """Without holding up the event loop."""

    async def wait(giver: Giver, taker: Taker) -> None:
        accepting = asyncio.create_task(taker.accept())
        await asyncio.sleep(0)
        assert not accepting.done()
        near, far = socket.socketpair()
        with near, far:
            assert giver.give(far)
            (await accepting).close()

    with ends() as (giver, taker):
        asyncio.run(wait(giver, taker))


def test_ends_that_could_not_be_told_are_told_later() -> None:
    """Nobody reads for a while, and the way is full: the count is right in the end."""
    with ends() as (giver, taker):
        giver.open = 100_000
        for _ in range(99_999):
            taker.released()
        giver.update()
        taker.released()
        giver.update()
        assert giver.open == 0


def test_nothing_is_given_to_an_end_that_is_gone() -> None:
    """The connection can be given to another."""
    near, far = socket.socketpair()
    with ends() as (giver, taker), near, far:
        taker.close()
        assert not giver.give(far)
        assert giver.open == 0


def test_a_giver_that_is_gone_is_an_error() -> None:
    """Not a connection."""
    with ends() as (giver, taker):
        giver.close()
        with pytest.raises(ConnectionResetError):
            asyncio.run(taker.accept())


def test_a_reserved_port_is_for_those_who_share_it() -> None:
    """Everybody else is refused, before and after somebody listens there."""
    with reserve(LOOPBACK, 0, "grpc_port") as reserved:
        port = reserved.getsockname()[1]
        refused = pytest.raises(ConfigError, match=f"grpc_port={port} is not valid: .*free port")
        with refused:
            reserve(LOOPBACK, port, "grpc_port")
        with refused:
            listen(LOOPBACK, port, "grpc_port")
        with sharing(port):
            with refused:
                reserve(LOOPBACK, port, "grpc_port")
            socket.create_connection((LOOPBACK, port)).close()


def test_a_port_is_free_after_its_reservation() -> None:
    """Also one that had connections."""
    port = free_port()
    with (
        reserve(LOOPBACK, port, "grpc_port"),
        sharing(port) as listener,
        socket.create_connection((LOOPBACK, port)),
    ):
        listener.accept()[0].close()  # closed here first: TIME_WAIT
    listen(LOOPBACK, port, "grpc_port").close()
    reserve(LOOPBACK, port, "grpc_port").close()
