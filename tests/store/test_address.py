"""Addresses of databases: no secret is ever shown, in whatever way it is written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchmill import ConfigError
from batchmill.store import open_store
from batchmill.store.address import HIDDEN, is_ambiguous, without_password

SHOWN = [
    ("postgresql://u:s3@h:1/d?x=1", "postgresql://u@h:1/d?x=1"),
    ("postgresql://u@h/d", "postgresql://u@h/d"),
    ("postgresql://h1:1,[::1]:2,h3/d", "postgresql://h1:1,[::1]:2,h3/d"),
    ("postgresql:///d?host=/tmp&port=5", "postgresql:///d?host=/tmp&port=5"),
    ("postgresql://u:p%40ss@h/d", "postgresql://u@h/d"),
    ("postgresql://u:@h/d", "postgresql://u@h/d"),
    ("sqlite:///a=b@c.db", "sqlite:///a=b@c.db"),
    ("sqlite:metrics.db", "sqlite:metrics.db"),
    ("metrics.db", "metrics.db"),
    ("C:\\metrics.db", "C:\\metrics.db"),
]
READABLE = [
    "postgresql://u:s3#cr3t@host/db",
    "postgresql://u:s3?cr3t@host/db",
    "postgresql://u:s3:cr3t@host/db",
    "postgresql://u:[cr3t@host/db",
    "postgresql://host/db?password=cr3t",
    "postgresql://host?password=cr3t",
    "postgresql://host/db?user=u&pass%77ord=cr3t",
    "postgresql://host/db?sslpassword=cr3t&sslmode=require",
    "postgresql://host/db?password=s3#cr3t",
    "postgresql://host/db?scram_client_key=cr3t",
    "postgresql://host/db?oauth_client_secret=cr3t",
]
"""libpq takes them as they are meant."""
REFUSED = [
    "postgresql://u:s3@cr3t@host/db",
    "postgresql://u:s3/cr3t@host/db",
    "postgresql://u:12/cr3t@host/db",
    "postgresql://u:s3%cr3t@host/db",
    "postgresql://u:cr3t/db",
    "postgresql://u:cr3t",
    "postgresql://host/db?PASSWORD=cr3t",
    "postgresql://host/db?password=s3&cr3t",
    "postgres://u:12/34?cr3t@host/db",
    "mysql://u:cr3t@host/db",
    "host=h user=u password=cr3t dbname=d",
    "host=h password='a://cr3t'",
    "u:cr3t@host/db",
    "postgresql:u:cr3t@host/db",
    "postgresql:/u:cr3t@host/db",
]
"""They cannot be read, or not as they are meant."""


@pytest.mark.parametrize(("address", "shown"), SHOWN)
def test_what_is_no_secret_is_shown(address: str, shown: str) -> None:
    """User, hosts, database and plain parameters tell which store is meant."""
    assert without_password(address) == shown


@pytest.mark.parametrize("address", [*READABLE, *REFUSED])
def test_a_secret_is_not_shown(address: str) -> None:
    """In the login or a parameter, encoded or not, and in an address that is none."""
    shown = without_password(address)
    assert not any(secret in shown for secret in ("s3", "cr3t", "12"))


@pytest.mark.parametrize("address", REFUSED)
def test_an_error_about_an_address_keeps_the_secret(address: str) -> None:
    """What libpq says of an address it cannot read quotes it, and so is not passed on."""
    pytest.importorskip("psycopg", reason="install it with: pip install 'batchmill[postgres]'")
    with pytest.raises(ConfigError, match="url=") as caught:
        open_store(address)
    error: BaseException | None = caught.value
    while error is not None:  # what a traceback would show
        assert not any(secret in str(error) for secret in ("s3", "cr3t"))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


@given(st.text("abc:/?#@&=%[], ", max_size=30))
def test_a_password_of_any_characters_is_not_shown(password: str) -> None:
    """Wherever it is put: marked by capitals at both ends, neither of them is left."""
    secret = f"XX{password}ZZ"
    for address in (
        f"postgresql://u:{secret}@h/d",
        f"postgresql://h/d?password={secret}",
        f"host=h password={secret}",
    ):
        shown = without_password(address)
        assert "XX" not in shown
        assert "ZZ" not in shown


def test_what_libpq_reads_as_it_is_meant_is_not_refused() -> None:
    """Also a password with ? and #, which end it elsewhere; more than one host; a folder."""
    for address in (*(url for url, _ in SHOWN[:6]), *READABLE):
        assert not is_ambiguous(address)
    assert without_password("postgresql://u:a@b@h/d") == f"postgresql://{HIDDEN}"
