"""The address of a database: how it may be shown, and whether it can be read in one way only.

Cut up as libpq does it, which is not as a browser does: a login ends at the first ``@`` in front of
any ``/``, so a password may hold ``?`` and ``#``, and there is no fragment behind a ``#``.
"""

from __future__ import annotations

import itertools
import re
from urllib.parse import unquote

HIDDEN = "…"
FILE = "sqlite:///"
ENCODED = (
    "postgresql://user:password@host:port/database, with what is special in a name or a password "
    "percent-encoded: % as %25, @ as %40, : as %3A, / as %2F, & as %26"
)

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
_HOST = re.compile(r"(\[[^\[\]]*\]|[^:\[\]@]*)(:[0-9]*)?")
_SECRET = ("pass", "secret", "key", "token", "credential")
"""What the name of a parameter with a secret holds: password, sslpassword, scram_client_key …"""


def without_password(address: str) -> str:
    """The address as it may be shown: what is not certainly harmless is left out.

    >>> without_password("postgresql://u:s3#@host/db?sslmode=require&sslpassword=s3")
    'postgresql://u@host/db?sslmode=require'
    >>> without_password("host=h password=s3")
    '…'
    """
    if address.startswith(FILE):
        return address
    scheme, separator, rest = address.partition("://")
    if not separator:
        harmless = address.startswith("sqlite:") or not set("@=:") & set(address[2:])
        return address if harmless else HIDDEN
    if not _SCHEME.fullmatch(scheme):
        return HIDDEN
    login, place, query = _cut(rest)
    if _is_misread(place) or "@" in query:
        return f"{scheme}://{HIDDEN}"
    user = f"{login.partition(':')[0]}@" if login is not None else ""
    # Up to the first secret: what comes behind may belong to it, if it holds an "&".
    shown = "&".join(itertools.takewhile(_is_harmless, query.split("&")))
    return f"{scheme}://{user}{place}" + (f"?{shown}" if shown else "")


def is_misread(address: str) -> bool:
    """Whether a part of a password may be taken for a host, a port or a database.

    >>> is_misread("postgresql://u:p@ss@host/db"), is_misread("postgresql://u:p%40ss@host/db")
    (True, False)
    """
    return _is_misread(_cut(address.partition("://")[2])[1])


def taken_out(address: str, name: str) -> tuple[str, str | None]:
    """The address without a parameter that is ours, and the parameter's value if it was there.

    >>> taken_out("postgresql://u@host/db?writers=2&sslmode=require", "writers")
    ('postgresql://u@host/db?sslmode=require', '2')
    """
    query = _cut(address.partition("://")[2])[2]
    given = [each.partition("=") for each in query.split("&")]
    values = [value for each, _, value in given if each == name]
    if not values:
        return address, None
    kept = "&".join("".join(each) for each in given if each[0] != name)
    before = address[: len(address) - len(query) - 1]
    return (f"{before}?{kept}" if kept else before), values[-1]


def _cut(rest: str) -> tuple[str | None, str, str]:
    """The login (None: there is none), hosts with the database, and the parameters."""
    login: str | None = None
    if "@" in rest.partition("/")[0]:
        login, _, rest = rest.partition("@")
    place, _, query = rest.partition("?")
    return login, place, query


def _is_misread(place: str) -> bool:
    hosts, _, database = place.partition("/")
    return "@" in database or not all(_HOST.fullmatch(each) for each in hosts.split(","))


def _is_harmless(parameter: str) -> bool:
    name, equals, _ = parameter.partition("=")
    name = unquote(name).lower()
    return bool(equals) and not any(each in name for each in _SECRET)
