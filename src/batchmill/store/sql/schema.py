"""The tables, and the migration of an older store to the present schema."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from batchmill.sources import Grain
from batchmill.store import alert_tables
from batchmill.store.buckets import day_of
from batchmill.store.errors import NamesClashError, NotAStoreError, StoreVersionError
from batchmill.store.sql.session import Dialect, Session, quote, read_meta, table_name
from batchmill.store.states import Cell

Step = Callable[[Session], None]

TABLES = """
CREATE TABLE meta (key {text} PRIMARY KEY, value {text} NOT NULL);
CREATE TABLE stream (
    name {text} PRIMARY KEY, checkpoint_id {text} NOT NULL, epoch {whole} NOT NULL,
    last_batch {whole}, committed_at {whole}, token {text}, holder {text});
CREATE TABLE carry (
    stream {text} NOT NULL, path {text} NOT NULL, batch {whole} NOT NULL,
    arrived_ms {whole} NOT NULL, n_rows {whole} NOT NULL, PRIMARY KEY (stream, path));
CREATE TABLE metric (
    name {text} NOT NULL, version {whole} NOT NULL, source {text} NOT NULL,
    definition {text} NOT NULL, function {text} NOT NULL, decorator {text},
    labelled {whole} NOT NULL, plan {text} NOT NULL, cells {text} NOT NULL, since_minute {whole},
    active {whole} NOT NULL, retired_minute {whole}, PRIMARY KEY (name, version));
CREATE TABLE metric_column (
    source {text} NOT NULL, number {whole} NOT NULL, cell {text} NOT NULL,
    metric {text} NOT NULL, version {whole} NOT NULL, PRIMARY KEY (source, number));
CREATE TABLE entity (
    key {identity}, kind {text} NOT NULL, id {text} NOT NULL, name {text} NOT NULL,
    roles {text} NOT NULL, UNIQUE (kind, id));
CREATE INDEX entity_id ON entity (id);
CREATE INDEX entity_name ON entity (name);
CREATE TABLE entity_layer (
    entity {whole} NOT NULL, layer {text} NOT NULL, PRIMARY KEY (entity, layer));
CREATE TABLE counter (
    what {text} NOT NULL, source {text} NOT NULL, reason {text} NOT NULL, n {whole} NOT NULL,
    PRIMARY KEY (what, source, reason));
CREATE TABLE topn (
    stream {text} NOT NULL, grain {text} NOT NULL, bucket {whole} NOT NULL,
    entity {whole} NOT NULL, latency {whole} NOT NULL, time_us {whole} NOT NULL,
    trace_id {text} NOT NULL, span_id {text} NOT NULL, statement {text} NOT NULL,
    digest {text} NOT NULL);
CREATE INDEX topn_place ON topn (stream, grain, bucket, entity);
CREATE INDEX topn_age ON topn (grain, bucket);
CREATE TABLE statement (
    stream {text} NOT NULL, grain {text} NOT NULL, bucket {whole} NOT NULL,
    entity {whole} NOT NULL, digest {text} NOT NULL, normalised {text} NOT NULL,
    runs {whole} NOT NULL, total_ms {whole} NOT NULL,
    PRIMARY KEY (stream, grain, bucket, entity, digest));
CREATE INDEX statement_age ON statement (grain, bucket)
"""


def _create(session: Session) -> None:
    dialect = session.dialect
    filled = TABLES.format(text=dialect.text, whole=dialect.whole, identity=dialect.identity)
    for statement in filled.split(";"):
        session.run(statement)
    session.run("INSERT INTO meta VALUES ('store_id', ?)", (str(uuid.uuid4()),))
    # There from the start, so that a writer can lock it before it reads it.
    session.run("INSERT INTO meta VALUES ('newest_minute', '')")
    session.install()


def _add_owners(session: Session) -> None:
    """Which stream computes which metric, when an entity was last seen, and the last cutoff."""
    text, whole = session.dialect.text, session.dialect.whole
    session.run(
        f"CREATE TABLE metric_owner (name {text} NOT NULL, version {whole} NOT NULL, "
        f"stream {text} NOT NULL, lasting {whole} NOT NULL, PRIMARY KEY (name, version, stream))"
    )
    # Not known: every stream may be an owner, and says so or not when it next registers.
    session.run(
        "INSERT INTO metric_owner SELECT metric.name, metric.version, stream.name, 1 "
        "FROM metric CROSS JOIN stream "
        "WHERE metric.active = 1 AND substr(stream.name, 1, 9) <> 'backfill-'"
    )
    session.run(f"ALTER TABLE entity ADD COLUMN last_day {whole} NOT NULL DEFAULT 0")
    newest = read_meta(session, "newest_minute")
    if newest:
        # None can have been seen later than that.
        session.run("UPDATE entity SET last_day = ?", (day_of(Grain.MINUTE, int(newest)),))
    session.run("INSERT INTO meta VALUES ('cutoff', '0')")
    session.install()


def _add_outbox(session: Session) -> None:
    """Files of changes that wait for exporters, and the exporters' positions."""
    text, whole = session.dialect.text, session.dialect.whole
    session.run(
        f"CREATE TABLE outbox (seq {whole} PRIMARY KEY, place {text} NOT NULL, "
        f"stream {text} NOT NULL, path {text} NOT NULL, n_rows {whole} NOT NULL, "
        f"bytes {whole} NOT NULL, committed_ms {whole} NOT NULL)"
    )
    session.run(
        f"CREATE TABLE export_position (exporter {text} NOT NULL, place {text} NOT NULL, "
        f"seq {whole} NOT NULL, PRIMARY KEY (exporter, place))"
    )
    session.run("INSERT INTO meta VALUES ('outbox_seq', '0')")


def _add_parts(session: Session) -> None:
    """Parts of batches that are committed one by one, and a lock for the owners of columns."""
    text, whole = session.dialect.text, session.dialect.whole
    session.run(
        f"CREATE TABLE part_commit (stream {text} NOT NULL, batch {whole} NOT NULL, "
        f"part {whole} NOT NULL, merged {whole} NOT NULL, n_rows {text} NOT NULL, "
        f"counters {text} NOT NULL, PRIMARY KEY (stream, batch, part))"
    )
    session.run(f"ALTER TABLE stream ADD COLUMN part_batch {whole}")
    session.run(f"ALTER TABLE stream ADD COLUMN part_cutoff {whole} NOT NULL DEFAULT 0")
    session.run(f"ALTER TABLE stream ADD COLUMN part_run {whole} NOT NULL DEFAULT 0")
    session.run("INSERT INTO meta VALUES ('columns', '')")


def _add_clocks(session: Session) -> None:
    """The time that expiry counts from, the writers' clocks, the newest minute of all."""
    whole = session.dialect.whole
    session.run(f"ALTER TABLE stream ADD COLUMN clock_ms {whole}")
    session.run(f"ALTER TABLE stream ADD COLUMN steady_ms {whole} NOT NULL DEFAULT 0")
    session.run("INSERT INTO meta VALUES ('clock', '')")
    session.run(
        "INSERT INTO meta SELECT 'last_minute', value FROM meta WHERE key = 'newest_minute'"
    )


def _add_alerts(session: Session) -> None:
    """Alert rules, their states and history, notifications, and a lock for all of them."""
    alert_tables.create_tables(session)
    session.run("INSERT INTO meta VALUES ('alerts', '')")


def _limit_labels(session: Session) -> None:
    """The functions that compact tallies of labels bound them."""
    session.install()


MIGRATIONS: list[Step] = [
    _create,
    _add_owners,
    _add_outbox,
    _add_parts,
    _add_clocks,
    _add_alerts,
    _limit_labels,
]
"""The steps from each version of the schema to the next; the first creates an empty store.

A step that a release has shipped is never changed: a new one is added behind it.
"""


@dataclass(frozen=True, slots=True)
class Schema:
    """The schema of a database."""

    version: int
    """0: there is no store yet."""
    store_id: str

    @property
    def is_current(self) -> bool:
        """Whether no migration is needed."""
        return self.version == len(MIGRATIONS)


def inspect(session: Session, url: str) -> Schema:
    """The schema that is there; raises if it is not a store's, or too new."""
    if not session.has_table("meta"):
        return Schema(0, "")
    if not session.has_table("stream") or not session.has_table("metric_column"):
        raise NotAStoreError(url, "it has a table 'meta' that is not batchmill's")
    meta: dict[str, str] = dict(session.rows("SELECT key, value FROM meta"))
    version, store_id = meta.get("schema_version", ""), meta.get("store_id", "")
    if not version.isdigit() or not store_id:
        raise NotAStoreError(url, "its table 'meta' has no schema version")
    if int(version) > len(MIGRATIONS):
        raise StoreVersionError(url, int(version), len(MIGRATIONS))
    return Schema(int(version), store_id)


def migrate(session: Session, url: str) -> Schema:
    """Bring the schema up to date, in the transaction that is open."""
    schema = inspect(session, url)
    if schema.is_current:
        return schema
    for step in MIGRATIONS[schema.version :]:
        step(session)
    session.run("DELETE FROM meta WHERE key = 'schema_version'")
    session.run("INSERT INTO meta VALUES ('schema_version', ?)", (str(len(MIGRATIONS)),))
    return inspect(session, url)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a source's tables, and the metric that it belongs to."""

    number: int
    cell: Cell
    metric: str
    version: int

    @property
    def name(self) -> str:
        """Its name in the tables."""
        return column_name(self.number)


def column_name(number: int) -> str:
    """The name of a column.

    >>> column_name(17)
    'c17'
    """
    return f"c{number}"


def create_tables(session: Session, source: str, columns: Sequence[Column]) -> None:
    """Create the three wide tables of a source."""
    dialect = session.dialect
    cells = "".join(f"{column.name} {dialect.cell_type(column.cell)}, " for column in columns)
    for grain in Grain:
        session.run(
            f"CREATE TABLE {quote(table_name(grain, source))} (bucket {dialect.whole} NOT NULL, "
            f"entity {dialect.whole} NOT NULL, {cells}PRIMARY KEY (bucket, entity)) "
            f"{dialect.wide_table(grain)}"
        )


def add_columns(session: Session, source: str, columns: Sequence[Column]) -> None:
    """Add columns to the three wide tables of a source."""
    for grain in Grain:
        table = quote(table_name(grain, source))
        for column in columns:
            kind = session.dialect.cell_type(column.cell)
            session.run(f"ALTER TABLE {table} ADD COLUMN {column.name} {kind}")


def clear_columns(session: Session, source: str, columns: Sequence[Column]) -> None:
    """Remove what a column's former metric may have left in it.

    Its values have expired, so there should be nothing. But a writer that started before the metric
    was retired may have gone on writing it, and its values are not the new metric's.
    """
    for grain in Grain:
        table = quote(table_name(grain, source))
        for name in (column.name for column in columns):
            session.run(f"UPDATE {table} SET {name} = NULL WHERE {name} IS NOT NULL")


def check_source_name(dialect: Dialect, source: str, others: set[str]) -> None:
    """Raise :class:`NamesClashError` if a source's tables would clash with others'."""
    longest = max(len(table_name(grain, source).encode()) for grain in Grain)
    if dialect.max_name_bytes is not None and longest > dialect.max_name_bytes:
        raise NamesClashError(
            source, f"its table's name is longer than {dialect.max_name_bytes} bytes"
        )
    if "\0" in source:
        raise NamesClashError(source, "its name has a NUL character")
    for other in others - {source}:
        if other.lower() == source.lower():
            raise NamesClashError(source, f"{other!r} differs from it by case only")
