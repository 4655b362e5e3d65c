"""Who may be connected: a bounded number of connections, shared among the addresses of peers.

A connection is a *guest* until a request on it has been authenticated. Guests have a part of the
seats only, and no claim to theirs: if a seat is needed, a guest of the address with the most guests
has to go. So strangers who keep many connections open disturb each other, and a sender with a
token, which is a guest for a moment, gets in. This module decides; it closes no connection.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

_GUEST_SHARE = 4
"""A quarter of the seats is for guests,"""
_LEAST_GUESTS = 64
"""or so many, if there are as many seats."""
_KNOWN_PEERS = 4096
"""Addresses that are remembered as authenticated."""
_KNOWN_SHARE = 8
"""An eighth of the guests' seats is safe for each of them."""


class SeatHolder(Protocol):
    """A connection, as far as its seat is concerned."""

    @property
    def busy(self) -> bool:
        """Whether a request is being answered."""

    def evict(self) -> None:
        """Close it: the seat is needed."""


@dataclass(eq=False, slots=True)
class Seat:
    """The seat of one connection."""

    peer: str
    """The address, without the port."""
    guest: bool = True
    reserve: bool = False
    """One of the reserve, beyond the limit: for health checks only."""
    connection: SeatHolder | None = None
    ended: bool = False
    """Whether the connection has ended."""
    authenticate: Callable[[], None] = field(default=lambda: None)
    """To be called when a request has been authenticated; it may be called again."""


class Seats:
    """The seats of one server. All methods are called on its event loop."""

    def __init__(self, limit: int, reserve: int = 0) -> None:
        """At most ``limit`` connections, and ``reserve`` more that ask for health only."""
        self._limit = limit
        self._reserve_limit = reserve
        self._guest_limit = max(min(limit, _LEAST_GUESTS), limit // _GUEST_SHARE)
        self._guests: dict[str, dict[Seat, None]] = {}
        self._members: dict[str, dict[Seat, None]] = {}
        self._reserve: dict[Seat, None] = {}
        self._guest_count = self._member_count = 0
        self._known: OrderedDict[str, None] = OrderedDict()

    def take(self, peer: str) -> tuple[Seat | None, Seat | None]:
        """A seat for a new connection, or None; and the seat whose connection has to go for it."""
        full = self._guest_count + self._member_count >= self._limit
        evicted = None
        if full or self._guest_count >= self._guest_limit:
            evicted = self._worst_guest() or (self._idle_member(peer) if full else None)
            if evicted is None and full:
                return self._reserve_seat(peer)
            if evicted is not None:
                self.release(evicted)
        seat = Seat(peer)
        seat.authenticate = lambda: self._authenticated(seat)
        self._guests.setdefault(peer, {})[seat] = None
        self._guest_count += 1
        return seat, evicted

    def release(self, seat: Seat) -> None:
        """Note that a connection has ended, or is about to; a second time changes nothing."""
        if seat.reserve:
            self._reserve.pop(seat, None)
            return
        seats = self._guests if seat.guest else self._members
        of_peer = seats.get(seat.peer, {})
        if seat not in of_peer:
            return
        del of_peer[seat]
        if not of_peer:
            del seats[seat.peer]
        if seat.guest:
            self._guest_count -= 1
        else:
            self._member_count -= 1

    def _authenticated(self, seat: Seat) -> None:
        if not seat.guest or seat not in self._guests.get(seat.peer, {}):
            return
        self.release(seat)
        seat.guest = False
        self._members.setdefault(seat.peer, {})[seat] = None
        self._member_count += 1
        self._known[seat.peer] = None
        self._known.move_to_end(seat.peer)
        if len(self._known) > _KNOWN_PEERS:
            self._known.popitem(last=False)

    def _reserve_seat(self, peer: str) -> tuple[Seat | None, Seat | None]:
        evicted = None
        if len(self._reserve) >= self._reserve_limit:
            evicted = next(_idle(self._reserve), None)
            if evicted is None:
                return None, None
            del self._reserve[evicted]
        seat = Seat(peer, reserve=True)
        self._reserve[seat] = None
        return seat, evicted

    def _worst_guest(self) -> Seat | None:
        """The oldest guest of the address that has the most, those with a safe share last."""
        safe = max(1, self._guest_limit // _KNOWN_SHARE)

        def key(peer: str) -> tuple[bool, int]:
            count = len(self._guests[peer])
            return peer not in self._known or count > safe, count

        for peer in sorted(self._guests, key=key, reverse=True):
            for seat in _idle(self._guests[peer]):
                return seat
        return None

    def _idle_member(self, peer: str) -> Seat | None:
        """An idle connection of the address with the most, if ``peer`` has far fewer."""
        largest = max(self._members, key=lambda known: len(self._members[known]), default="")
        own = len(self._members.get(peer, ()))
        if largest == peer or len(self._members.get(largest, ())) <= 2 * own + 1:
            return None
        return next(_idle(self._members[largest]), None)


def _idle(seats: dict[Seat, None]) -> Iterator[Seat]:
    """Seats that can be taken away, the oldest first."""
    return (seat for seat in seats if seat.connection is None or not seat.connection.busy)
