"""The store in a PostgreSQL database. Loads without psycopg: a connection says if it is missing."""

from batchmill.store.postgres.store import PostgresStore

__all__ = ["PostgresStore"]
