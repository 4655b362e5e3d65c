"""Hands accepted connections to other processes, each to the one with the fewest open.

A :class:`Giver` and a :class:`Taker` are the two ends of a Unix socket. The giver sends a
connection with each message; the taker answers with the number of connections that have ended
since, so that the giver knows how many are open there.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket

_MESSAGE = b"c"
_MESSAGE_BYTES = 32


def handover_pair() -> tuple[socket.socket, socket.socket]:
    """The two ends of a way for connections."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class Giver:
    """Hands connections to one process. All methods are called on one event loop."""

    def __init__(self, link: socket.socket) -> None:
        self.open = 0
        """Connections that were given and have not ended."""
        self._link = link
        link.setblocking(False)

    def give(self, client: socket.socket) -> bool:
        """Hand over a connection; False if the process is gone, or takes none at the moment.

        The caller closes its own copy.
        """
        try:
            socket.send_fds(self._link, [_MESSAGE], [client.fileno()])
        except OSError:
            return False
        self.open += 1
        return True

    def update(self) -> None:
        """Count the connections that have ended since the last call."""
        with contextlib.suppress(OSError):
            while message := self._link.recv(_MESSAGE_BYTES):
                self.open -= int(message)

    def close(self) -> None:
        """Give no more; connections that were not taken are closed."""
        self._link.close()


class Taker:
    """Takes the connections that another process has accepted."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._ended = 0
        link.setblocking(False)

    async def accept(self) -> socket.socket:
        """Wait for a connection; OSError once the giver is gone, or if one could not be taken."""
        while True:
            try:
                message, handles, _, _ = socket.recv_fds(self._link, _MESSAGE_BYTES, 1)
            except BlockingIOError:
                await self._readable()
                continue
            if not message:
                raise ConnectionResetError("no connections are handed over any more")
            if handles:
                return socket.socket(fileno=handles[0])
            self.released()
            raise OSError(errno.EMFILE, "no file descriptor was left for a connection")

    def released(self) -> None:
        """Tell that a connection has ended."""
        self._ended += 1
        with contextlib.suppress(OSError):  # full, or nobody reads it: it is told the next time
            self._link.send(b"%d" % self._ended)
            self._ended = 0

    def close(self) -> None:
        """Take no more."""
        self._link.close()

    async def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        readable: asyncio.Future[None] = loop.create_future()
        loop.add_reader(self._link, _finish, readable)
        try:
            await readable
        finally:
            loop.remove_reader(self._link)


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
