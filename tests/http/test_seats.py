"""Who may be connected: guests make room, those who have authenticated stay."""

from __future__ import annotations

from dataclasses import dataclass

from batchmill.http.seats import Seat, Seats


@dataclass
class Link:
    """A connection."""

    busy: bool = False

    def evict(self) -> None:
        """Nothing: the seats only choose."""


def taken(seats: Seats, peer: str, *, busy: bool = False) -> Seat:
    """A seat that must be there, without anybody going for it."""
    seat, evicted = seats.take(peer)
    assert seat is not None
    assert evicted is None
    seat.connection = Link(busy)
    return seat


def test_the_oldest_guest_of_the_largest_crowd_makes_room() -> None:
    """Not that of another address, and not one whose request is being answered."""
    seats = Seats(4)
    other = taken(seats, "b")
    crowd = [taken(seats, "a", busy=number == 0) for number in range(3)]
    seat, evicted = seats.take("c")
    assert seat is not None
    assert evicted is crowd[1]
    assert evicted is not other


def test_guests_have_a_quarter_of_many_seats() -> None:
    """However many are free."""
    seats = Seats(1000)
    guests = [taken(seats, "a") for _ in range(250)]
    _, evicted = seats.take("a")
    assert evicted is guests[0]
    guests[1].authenticate()
    assert seats.take("a")[1] is None  # a member is none of the guests


def test_members_are_not_sent_away_for_guests() -> None:
    """Beyond the limit there is a reserve for health checks, and then nothing."""
    seats = Seats(2, reserve=1)
    for _ in range(2):
        taken(seats, "a").authenticate()
    spare, evicted = seats.take("a")
    assert spare is not None
    assert (spare.reserve, evicted) == (True, None)
    spare.connection = Link()
    again, evicted = seats.take("a")
    assert again is not None
    assert again.reserve
    assert evicted is spare  # a health check that is over
    again.connection = Link(busy=True)
    assert seats.take("a") == (None, None)
    seats.release(again)
    assert seats.take("a")[0] is not None


def test_an_address_that_has_authenticated_has_a_safe_share() -> None:
    """Strangers make room before it does, though each has fewer guests than it."""
    seats = Seats(64)
    taken(seats, "known").authenticate()
    for _ in range(8):
        taken(seats, "known")
    first, *_ = [taken(seats, f"stranger {number}") for number in range(55)]
    assert seats.take("another")[1] is first
    for _ in range(60):  # but only so many
        _, evicted = seats.take("known")
    assert evicted is not None
    assert evicted.peer == "known"


def test_an_idle_member_of_an_address_with_most_seats_makes_room_for_another() -> None:
    """Seats are shared among addresses, too."""
    seats = Seats(8)
    members = [taken(seats, "a") for _ in range(8)]
    for member in members:
        member.authenticate()
    assert seats.take("a") == (None, None)
    seat, evicted = seats.take("b")
    assert seat is not None
    assert evicted is members[0]


def test_a_seat_is_released_once() -> None:
    """One that was taken away, too, when its connection ends."""
    seats = Seats(1)
    first = taken(seats, "a")
    second, evicted = seats.take("a")
    assert evicted is first
    assert second is not None
    second.connection = Link(busy=True)
    seats.release(first)
    first.authenticate()
    assert seats.take("a") == (None, None)
