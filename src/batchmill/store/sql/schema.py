"""The tables, and how an older store becomes a newer one."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from batchmill.sources import Grain
from batchmill.store.errors import NamesClashError, NotAStoreError, StoreVersionError
from batchmill.store.sql.allot import Column
from batchmill.store.sql.merging import cell_type, quoted, table_name
from batchmill.store.sql.session import Dialect, Session
from batchmill.store.ttl import day_of

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


def _first(session: Session) -> None:
    dialect = session.dialect
    filled = TABLES.format(text=dialect.text, whole=dialect.whole, identity=dialect.identity)
    for statement in filled.split(";"):
        session.run(statement)
    session.run("INSERT INTO meta VALUES ('store_id', ?)", (str(uuid.uuid4()),))
    # There from the start, so that a writer can lock it before it reads it.
    session.run("INSERT INTO meta VALUES ('newest_minute', '')")
    session.install()


def _second(session: Session) -> None:
    """Who computes which metric, when an entity was last seen, and what has been removed."""
    text, whole = session.dialect.text, session.dialect.whole
    session.run(
        f"CREATE TABLE metric_owner (name {text} NOT NULL, version {whole} NOT NULL, "
        f"stream {text} NOT NULL, lasting {whole} NOT NULL, PRIMARY KEY (name, version, stream))"
    )
    # It was not noted: whoever it may have been is asked at its next start.
    session.run(
        "INSERT INTO metric_owner SELECT metric.name, metric.version, stream.name, 1 "
        "FROM metric CROSS JOIN stream "
        "WHERE metric.active = 1 AND substr(stream.name, 1, 9) <> 'backfill-'"
    )
    session.run(f"ALTER TABLE entity ADD COLUMN last_day {whole} NOT NULL DEFAULT 0")
    ((newest,),) = session.rows("SELECT value FROM meta WHERE key = 'newest_minute'")
    if newest:
        # None can have been seen later than that.
        session.run("UPDATE entity SET last_day = ?", (day_of(Grain.MINUTE, int(newest)),))
    session.run("INSERT INTO meta VALUES ('cutoff', '0')")
    session.install()


def _third(session: Session) -> None:
    """The outbox: files of changes that wait for exporters, and how far those have come."""
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


MIGRATIONS: list[Step] = [_first, _second, _third]
"""What leads from each version of the schema to the next; the first makes an empty store.

A step that a release has shipped is never changed again: a new one is added behind it.
"""


@dataclass(frozen=True, slots=True)
class Found:
    """What :func:`inspect` found."""

    version: int
    """0: nothing yet."""
    store_id: str


def inspect(session: Session, url: str) -> Found:
    """Which version of the schema is there; raises if it is none, or too new."""
    if not session.has_table("meta"):
        return Found(0, "")
    if not session.has_table("stream") or not session.has_table("metric_column"):
        raise NotAStoreError(url, "it has a table 'meta' that is not batchmill's")
    meta: dict[str, str] = dict(session.rows("SELECT key, value FROM meta"))
    version, store_id = meta.get("schema_version", ""), meta.get("store_id", "")
    if not version.isdigit() or not store_id:
        raise NotAStoreError(url, "its table 'meta' lacks the schema's version")
    if int(version) > len(MIGRATIONS):
        raise StoreVersionError(url, int(version), len(MIGRATIONS))
    return Found(int(version), store_id)


def migrate(session: Session, url: str) -> Found:
    """Bring the schema up to date, in the transaction that is open."""
    found = inspect(session, url)
    if found.version == len(MIGRATIONS):
        return found
    for step in MIGRATIONS[found.version :]:
        step(session)
    session.run("DELETE FROM meta WHERE key = 'schema_version'")
    session.run("INSERT INTO meta VALUES ('schema_version', ?)", (str(len(MIGRATIONS)),))
    return inspect(session, url)


def create_tables(session: Session, source: str, columns: Sequence[Column]) -> None:
    """Make the three wide tables of a source."""
    whole, tail = session.dialect.whole, session.dialect.wide_table
    cells = "".join(f"{each.name} {cell_type(session.dialect, each.cell)}, " for each in columns)
    for grain in Grain:
        session.run(
            f"CREATE TABLE {quoted(table_name(grain, source))} (bucket {whole} NOT NULL, "
            f"entity {whole} NOT NULL, {cells}PRIMARY KEY (bucket, entity)) {tail}"
        )


def add_columns(session: Session, source: str, columns: Sequence[Column]) -> None:
    """Add columns to the three wide tables of a source."""
    for grain in Grain:
        table = quoted(table_name(grain, source))
        for each in columns:
            kind = cell_type(session.dialect, each.cell)
            session.run(f"ALTER TABLE {table} ADD COLUMN {each.name} {kind}")


def empty_columns(session: Session, source: str, columns: Sequence[Column]) -> None:
    """Forget what a column's former metric may have left in it.

    There should be nothing: its values have expired. But a writer that began before the metric was
    retired may have gone on writing it since, and its values are not the new metric's.
    """
    for grain in Grain:
        table = quoted(table_name(grain, source))
        for each in columns:
            session.run(f"UPDATE {table} SET {each.name} = NULL WHERE {each.name} IS NOT NULL")


def check_source_name(dialect: Dialect, source: str, others: set[str]) -> None:
    """Raise :class:`NamesClashError` if a source's tables could not be told from others."""
    longest = max(len(table_name(grain, source).encode()) for grain in Grain)
    if dialect.most_name_bytes is not None and longest > dialect.most_name_bytes:
        raise NamesClashError(source, f"its table's name is longer than {dialect.most_name_bytes}")
    if "\0" in source:
        raise NamesClashError(source, "its name holds a NUL character")
    for other in others - {source}:
        if other.lower() == source.lower():
            raise NamesClashError(source, f"{other!r} differs from it by case only")
