"""Which destinations send no spans, so that a call to one need not wait for who serves it.

Hosts outside, servers on the Internet, of others: a host counts as outside if its name, or its
address, is a public one, at whatever port. Services within a system are called by other names
(``orders``, ``orders.shop.svc``) or at private addresses. A name of two parts may be that of a
service in Kubernetes (``orders.shop``): outside of the web's ports it is public only if it ends
like most names of companies.

And silent destinations, of any name: calls to one were given up in several batches, and none was
answered in between. One lost batch of a service's spans does not make it silent.

A destination of either sort that somebody answers for is known to answer from then on: see
:mod:`.links`.
"""

from __future__ import annotations

import functools
import ipaddress
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

_PLACE = re.compile(r"(?:\[(?P<v6>[^\]]+)\]|(?P<host>[^:]+))(?::(?P<port>[0-9]+))?")
_WEB_PORTS = (None, "80", "443", "8443")
_NAME = re.compile(
    r"(?:[a-z0-9_](?:[a-z0-9_-]*[a-z0-9])?\.)+(?:[a-z]{2,}|xn--[a-z0-9-]+)", re.ASCII
)
_OWN = (
    *("local", "localhost", "localdomain", "internal", "intranet", "private", "corp", "home"),
    *("lan", "svc", "cluster", "consul", "docker", "test", "invalid", "arpa"),
)
"""Last parts of names that are no public ones. ``example`` is not among them, though no such host
exists: in demos and docs, where alone it is used, it names a host of others."""
_LONGEST = 253
"""Characters of a name in DNS."""
_COMPANIES = ("com", "net", "org", "io")

MOST_HOSTS = 10_000
"""Of more that have answered, none is known to be outside or silent: all calls wait. Of more that
have not, the oldest are forgotten."""
_GIVEN_UP = 3
"""In so many batches calls to a destination are given up before it is silent."""


@dataclass(frozen=True)
class KnownHosts:
    """What earlier batches have learned about the destinations of calls.

    A batch does not change it, but gives what the next one starts from: a batch that is repeated
    starts from the same.
    """

    answering: frozenset[str] = frozenset()
    """Those outside, or silent, that somebody has answered for."""
    unanswered: Mapping[str, int] = field(default_factory=dict)
    """In how many batches calls to a destination were given up, and none was answered since; the
    oldest destination first."""

    def is_outside(self, place: str) -> bool:
        """Whether a destination is a host outside that has never answered."""
        return place not in self.answering and is_outside(place)

    def is_silent(self, place: str) -> bool:
        """Whether a destination sends no spans, as far as is known."""
        return self.unanswered.get(place, 0) >= _GIVEN_UP

    def after(self, answered: Collection[str], given_up: Collection[str]) -> KnownHosts:
        """What is known after a batch in which calls to these were answered, or given up."""
        late = {place for place in answered if self.is_silent(place) or is_outside(place)}
        answering = self.answering | late
        counts = {place: n for place, n in self.unanswered.items() if place not in answered}
        for place in sorted(set(given_up) - answering - set(answered)):
            if len(place.encode()) <= _LONGEST:
                counts[place] = min(counts.get(place, 0) + 1, _GIVEN_UP)
        newest = list(counts.items())[-MOST_HOSTS:]
        return KnownHosts(answering, dict(newest))


@functools.lru_cache(maxsize=4096)
def is_outside(place: str) -> bool:
    """Whether a destination, as ``host:port`` or ``host``, is a host outside.

    >>> is_outside("smtp.mail.com:587"), is_outside("orders:8080"), is_outside("10.0.0.7:443")
    (True, False, False)
    """
    match = _PLACE.fullmatch(place)
    if match is None:
        return False
    host = (match["v6"] or match["host"]).lower().rstrip(".")
    if len(host) > _LONGEST:
        return False
    try:
        return ipaddress.ip_address(host).is_global
    except ValueError:
        pass
    *parts, last = host.split(".")
    if _NAME.fullmatch(host) is None or last in _OWN:
        return False
    return len(parts) > 1 or match["port"] in _WEB_PORTS or last in _COMPANIES
