"""A store's address: opening it, showing it without its password, and what libpq makes of it.

Addresses are split as libpq does it, which differs from a browser: a login ends at the first ``@``
in front of any ``/``, so a password may contain ``?`` and ``#``, and ``#`` starts no fragment.
"""

from __future__ import annotations

import itertools
import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote

from batchmill.errors import ConfigError, check_int
from batchmill.store.retry import RetryPolicy

if TYPE_CHECKING:
    from batchmill.store.store import Store

READING = RetryPolicy(give_up_after_s=5)
"""How long readers wait for a database that cannot be reached: a person may be waiting for them."""
HIDDEN = "…"
FILE = "sqlite:///"
ALLOWED = "sqlite:///relative.db, sqlite:////absolute.db or postgresql://user@host/database"
ENCODED = (
    "postgresql://user:password@host:port/database, with special characters in a name or a "
    "password percent-encoded: % as %25, @ as %40, : as %3A, / as %2F, & as %26"
)

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
_HOST = re.compile(r"(\[[^\[\]]*\]|[^:\[\]@]*)(:[0-9]*)?")
_SECRET = ("pass", "secret", "key", "token", "credential")
"""Parts of the names of parameters that are secret: password, sslpassword, scram_client_key …"""


def open_store(
    url: str,
    *,
    retry: RetryPolicy | None = None,
    ttl_days: int = 7,
    top_n: int = 50,
    create: bool = True,
) -> Store:
    """Open the store at ``url``; create it if there is none, migrate it if it is an older one.

    ``ttl_days``: whole days that are kept before the newest one, by event time. ``top_n``: how many
    of the slowest calls are kept for each entity and bucket. With ``create=False``, for readers, a
    missing store is a :class:`StoreMissingError`, and one that cannot be reached is given up after
    seconds, unless ``retry`` says otherwise; a writer tries for minutes.

    >>> open_store("mysql://somewhere")
    Traceback (most recent call last):
        ...
    batchmill.errors.ConfigError: url='mysql://somewhere' is not valid: it must be \
sqlite:///relative.db, sqlite:////absolute.db or postgresql://user@host/database
    """
    check_int("ttl_days", ttl_days, 1)
    check_int("top_n", top_n, 1)
    policy = retry or (RetryPolicy() if create else READING)
    scheme, _, rest = url.partition("://")
    if scheme == "sqlite" and rest.startswith("/") and len(rest) > 1:
        from batchmill.store.sqlite import SqliteStore

        return SqliteStore(rest[1:], policy, ttl_days=ttl_days, top_n=top_n, create=create)
    if scheme in ("postgresql", "postgres") and rest:
        from batchmill.store.postgres import PostgresStore

        shown = without_password(url)
        if is_ambiguous(url):  # libpq's error message could quote a part of the password
            raise ConfigError("url", shown, ENCODED)
        return PostgresStore(url, shown, policy, ttl_days=ttl_days, top_n=top_n, create=create)
    raise ConfigError("url", without_password(url), ALLOWED)


@dataclass(frozen=True, slots=True)
class TaskAddress:
    """From what a task opens the driver's store; see :func:`open_for_task`."""

    shown: str
    store_id: str
    ttl_days: int
    top_n: int
    policy: RetryPolicy
    parameters: tuple[tuple[str, str], ...] = field(repr=False)
    """Of the connection, the password among them."""

    def open(self) -> Store:
        """A store with connections of its own."""
        from batchmill.store.postgres import PostgresStore

        return PostgresStore(
            dict(self.parameters),
            self.shown,
            self.policy,
            ttl_days=self.ttl_days,
            top_n=self.top_n,
            create=False,
            for_task_of=self.store_id,
        )


_of_tasks: dict[tuple[int, TaskAddress], Store] = {}
"""The stores of this process; those of the process that it was forked from are not used."""


def open_for_task(address: TaskAddress) -> Store:
    """The store of a task: one for all tasks of a process, which never closes it."""
    key = (os.getpid(), address)
    store = _of_tasks.get(key)
    if store is None:
        store = _of_tasks[key] = address.open()
    return store


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
    parts = _split(rest)
    if _is_ambiguous(parts.place) or "@" in parts.query:
        return f"{scheme}://{HIDDEN}"
    user = f"{parts.login.partition(':')[0]}@" if parts.login is not None else ""
    # Up to the first secret: what follows may belong to it, if the secret contains an "&".
    shown = "&".join(itertools.takewhile(_is_harmless, parts.query.split("&")))
    return f"{scheme}://{user}{parts.place}" + (f"?{shown}" if shown else "")


def is_ambiguous(address: str) -> bool:
    """Whether a part of a password may be taken for a host, a port or a database.

    >>> is_ambiguous("postgresql://u:p@ss@host/db"), is_ambiguous("postgresql://u:p%40ss@host/db")
    (True, False)
    """
    return _is_ambiguous(_split(address.partition("://")[2]).place)


class _Parts(NamedTuple):
    login: str | None
    place: str
    """Hosts and database."""
    query: str


def _split(rest: str) -> _Parts:
    """The parts of an address behind its scheme."""
    login: str | None = None
    if "@" in rest.partition("/")[0]:
        login, _, rest = rest.partition("@")
    place, _, query = rest.partition("?")
    return _Parts(login, place, query)


def _is_ambiguous(place: str) -> bool:
    hosts, _, database = place.partition("/")
    return "@" in database or not all(_HOST.fullmatch(host) for host in hosts.split(","))


def _is_harmless(parameter: str) -> bool:
    name, equals, _ = parameter.partition("=")
    name = unquote(name).lower()
    return bool(equals) and not any(part in name for part in _SECRET)
