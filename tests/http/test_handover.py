"""Several processes that serve one port: connections are handed over."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import pytest

from batchmill.http import Giver, Taker, handover_pair


@contextlib.contextmanager
def ends() -> Iterator[tuple[Giver, Taker]]:
    """Both ends of a way for connections."""
    giving, taking = handover_pair()
    giver, taker = Giver(giving), Taker(taking)
    with contextlib.closing(giver), contextlib.closing(taker):
        yield giver, taker


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
