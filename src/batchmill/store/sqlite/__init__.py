"""The store in an SQLite file."""

from batchmill.store.sqlite.store import SqliteStore

__all__ = ["SqliteStore"]
