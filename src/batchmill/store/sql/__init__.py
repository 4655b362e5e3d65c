"""The SQL of a store, for SQLite and PostgreSQL alike: functions over an open :class:`Session`."""
