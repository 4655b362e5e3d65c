"""Opening a store by its address."""

from __future__ import annotations

from batchmill.errors import ConfigError
from batchmill.store.address import ENCODED, is_misread, taken_out, without_password
from batchmill.store.protocol import Store
from batchmill.store.retry import RetryPolicy

ALLOWED = "sqlite:///relative.db, sqlite:////absolute.db or postgresql://user@host/database"
POSTGRES = ("postgresql", "postgres")


def open_store(
    url: str,
    *,
    retry: RetryPolicy | None = None,
    ttl_days: int = 7,
    top_n: int = 50,
    create: bool = True,
) -> Store:
    """Open the store at ``url``; make it if nothing is there, migrate it if it is an older one.

    ``ttl_days``: whole days that are kept before the newest one, by event time. ``top_n``: how many
    of the slowest calls are kept for each entity and bucket. With ``create=False`` a store that is
    not there is a :class:`StoreMissingError`. ``postgresql://…?writers=4`` tells over how many
    connections the rows of large batches come; with 1 there is none but the one that commits.

    >>> open_store("mysql://somewhere")
    Traceback (most recent call last):
        ...
    batchmill.errors.ConfigError: url='mysql://somewhere' is not valid: it must be \
sqlite:///relative.db, sqlite:////absolute.db or postgresql://user@host/database
    """
    for name, value in (("ttl_days", ttl_days), ("top_n", top_n)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(name, value, "a whole number of at least 1")
    policy = retry or RetryPolicy()
    scheme, _, rest = url.partition("://")
    if scheme == "sqlite" and rest.startswith("/") and len(rest) > 1:
        from batchmill.store.sqlite.store import SqliteStore

        return SqliteStore(rest[1:], policy, ttl_days=ttl_days, top_n=top_n, create=create)
    if scheme in POSTGRES and rest:
        from batchmill.store.postgres.settings import writer_settings
        from batchmill.store.postgres.store import PostgresStore

        shown = without_password(url)
        if is_misread(url):  # what libpq said of it might quote a part of the password
            raise ConfigError("url", shown, ENCODED)
        address, writers = taken_out(url, "writers")
        return PostgresStore(
            address,
            shown,
            policy,
            ttl_days=ttl_days,
            top_n=top_n,
            create=create,
            writers=writer_settings(writers),
        )
    raise ConfigError("url", without_password(url), ALLOWED)
