"""Which destinations of calls are hosts outside: servers on the Internet, of others.

Such a host sends no spans, so a call to it need not wait for somebody who serves it. A host counts
as outside if its name, or its address, is a public one, and if it is called at a port of the web.
Services within a system are called by other names (``orders``, ``orders.shop.svc``), at private
addresses, or at ports of their own. One that is called by a public name all the same answers, and
is known from then on: see :mod:`.links`.
"""

from __future__ import annotations

import functools
import ipaddress
import re

_PLACE = re.compile(r"(?:\[(?P<v6>[^\]]+)\]|(?P<host>[^:]+))(?::(?P<port>[0-9]+))?")
_WEB_PORTS = (None, "80", "443", "8443")
_NAME = re.compile(
    r"(?:[a-z0-9_](?:[a-z0-9_-]*[a-z0-9])?\.)+(?:[a-z]{2,}|xn--[a-z0-9-]+)", re.ASCII
)
_OWN = (
    *("local", "localhost", "localdomain", "internal", "intranet", "private", "corp", "home"),
    *("lan", "svc", "cluster", "consul", "docker", "test", "example", "invalid", "arpa"),
)
"""Last parts of names that are no public ones."""
_EXAMPLES = ("example.com", "example.net", "example.org")
"""Reserved for documentation and tests."""


@functools.lru_cache(maxsize=4096)
def is_outside(place: str) -> bool:
    """Whether a destination, as ``host:port`` or ``host``, is a host outside.

    >>> is_outside("api.stripe.com:443"), is_outside("orders:8080"), is_outside("10.0.0.7:443")
    (True, False, False)
    """
    match = _PLACE.fullmatch(place)
    if match is None or match["port"] not in _WEB_PORTS:
        return False
    host = (match["v6"] or match["host"]).lower().rstrip(".")
    try:
        return ipaddress.ip_address(host).is_global
    except ValueError:
        pass
    if _NAME.fullmatch(host) is None or host.rpartition(".")[2] in _OWN:
        return False
    return not any(host == name or host.endswith(f".{name}") for name in _EXAMPLES)
