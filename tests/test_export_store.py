"""Exporters and their store: what they do while it cannot be reached, and what they ask of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from batchmill.export import Exporter, Target, open_sender
from batchmill.outbox import Outbox
from batchmill.store import RetryPolicy, Store, open_store
from tests.export_kit import (
    QUICK,
    Mill,
    added_up,
    last_totals,
    measurements,
    mill,
    running,
    stored,
)
from tests.otlp_metrics_receiver import GrpcReceiver
from tests.postgres import Postgres
from tests.store_kit import PATIENT, Measurement, end, in_another_process, line_of

HASTY = RetryPolicy(initial_ms=1, max_ms=5, give_up_after_s=0.05)


def wait_until(done: Callable[[], Any]) -> None:
    """Nobody tells of what an exporter counts: it is asked for."""
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        threading.Event().wait(0.02)


def test_a_database_that_was_restarted_loses_no_export(
    postgres: Postgres, postgres_url: str, tmp_path: Path
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
            wait_until(lambda: exporter._figures.of("export retries").get("store unavailable"))
            postgres.start()
            one.commit(*measurements(1))
            wait_until(lambda: not one.store.outbox(one.outbox.place))
        assert last_totals(receiver.points()) == stored(one.store)
        assert one.counted("export retries")["store unavailable"] > 0


COMMIT_FOR_EVER = """
import itertools, pathlib
from tests.export_kit import measurements, mill
one = mill(pathlib.Path(folder))
for number in itertools.count():
    one.commit(*measurements(number, 40))
    print(number, flush=True)
"""


def test_killed_while_it_commits_a_writer_loses_no_export(tmp_path: Path) -> None:
    """Every commit that is in the store has its file, and no other file is exported."""
    writer = in_another_process(COMMIT_FOR_EVER, folder=str(tmp_path))
    for number in range(8):
        assert line_of(writer) == str(number)
    end(writer)
    outbox = Outbox.of(tmp_path / "checkpoint")
    with open_store(f"sqlite:///{tmp_path}/store.db") as store, GrpcReceiver() as receiver:
        (info,) = store.streams()
        assert info.last_batch is not None
        assert len(store.outbox(outbox.place)) == info.last_batch + 1 >= 8
        sender = open_sender(Target.parse(receiver.target), QUICK)
        Exporter(store=store, outbox=outbox, sender=sender, name="test", settings=QUICK).run(
            once=True
        )
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
