"""Exporters and their store: what they do while it cannot be reached, and what they ask of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchmill.outbox import Outbox
from batchmill.store import Store, open_store
from tests.kit.exporters import (
    Mill,
    added_up,
    check_all_arrived,
    exporter_of,
    last_totals,
    measurements,
    mill,
    running,
    stored,
)
from tests.kit.otlp import GrpcReceiver
from tests.kit.processes import Life
from tests.kit.servers.postgres import Postgres
from tests.kit.stores import (
    HASTY,
    PATIENT,
    Measurement,
    before_merges,
    open_postgres,
)
from tests.kit.threads import until


def test_a_database_that_was_restarted_loses_no_export(
    postgres: Postgres, postgres_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The exporter has its own connection, and tries again; that is counted."""
    one = Mill(open_store(postgres_url, retry=PATIENT), tmp_path / "checkpoint")
    exporters_own: Store = open_store(postgres_url, retry=HASTY)
    with one.store, exporters_own, GrpcReceiver() as receiver:
        exporter = one.exporter(receiver.target, store=exporters_own)
        with running(exporter):
            one.commit(*measurements(0))
            receiver.wait_for(lambda: receiver.seen > 0)
            postgres.stop()
            until(lambda: any(record.name == "batchmill.export" for record in caplog.records))
            postgres.start()
            one.commit(*measurements(1))
            until(lambda: not one.store.outbox(one.outbox.place))
        check_all_arrived(one, receiver.points())
        assert one.counted("export retries")["store unavailable"] > 0


@pytest.mark.parametrize("mode", ["immediate", "fast"])
def test_a_database_restarted_inside_a_merge_exports_each_commit_once(
    postgres: Postgres,
    postgres_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
) -> None:
    """The commit is tried again, and names its file once; then all arrives."""
    one = Mill(open_postgres(postgres_url), tmp_path / "checkpoint")
    merges: list[str] = []

    def restart(table: str) -> None:
        merges.append(table)
        if len(merges) == 3:
            postgres.stop(mode)
            postgres.start()

    with one.store, GrpcReceiver() as receiver:
        one.commit(*measurements(0, 12, [f"e{number}" for number in range(6)]))
        before_merges(monkeypatch, restart)
        one.commit(*measurements(1, 12, [f"e{number}" for number in range(6)]))
        assert len(merges) > 3
        assert [file.seq for file in one.store.outbox(one.outbox.place)] == [1, 2]
        one.exporter(receiver.target).run(once=True)
        check_all_arrived(one, receiver.points())


COMMIT_FOR_EVER = """
import itertools, pathlib
from tests.kit.exporters import measurements, mill
one = mill(pathlib.Path(folder))
for number in itertools.count():
    one.commit(*measurements(number, 40))
    print(number, flush=True)
"""


def test_killed_while_it_commits_a_writer_loses_no_export(tmp_path: Path) -> None:
    """Every commit that is in the store has its file, and no other file is exported."""
    with Life.of_script(COMMIT_FOR_EVER, folder=str(tmp_path)) as writer:
        writer.must_hear("7")
    outbox = Outbox.of(tmp_path / "checkpoint")
    with open_store(f"sqlite:///{tmp_path}/store.db") as store, GrpcReceiver() as receiver:
        (info,) = store.streams()
        assert info.last_batch is not None
        assert len(store.outbox(outbox.place)) == info.last_batch + 1 >= 8
        exporter_of(store, outbox, receiver.target).run(once=True)
        calls = {key: n for key, n in stored(store).items() if key[0] == "batchmill.calls"}
        assert added_up(receiver.points(), "calls") == calls
        assert last_totals(receiver.points()) == stored(store)


def test_many_entities_and_minutes_are_exported_a_part_at_a_time(tmp_path: Path) -> None:
    """More than one query and one part of a file can hold of them."""
    one = mill(tmp_path)
    rows = [
        Measurement(number % 50, minute=202403010000 + 100 * (number % 20) + number % 50,
                    entity=f"e{number % 700}")
        for number in range(2_500)
    ]  # fmt: skip
    with one.store, GrpcReceiver() as receiver:
        one.commit(*rows)
        exporter = one.exporter(receiver.target)
        exporter.run(once=True)
        wanted = stored(one.store)
        assert last_totals(receiver.points()) == wanted
        assert len({key[1] for key in wanted}) == 100
        assert exporter.stats().dropped == {}
