"""The outbox: files written before the commit, named by it, and gone when nobody waits for them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from batchmill.outbox import NoOutboxError, Outbox, OutboxFileError, OutboxSettings
from batchmill.sources import Grain, UnknownNameError
from batchmill.store import EntityRow
from tests.kit.exporters import Mill, measurements, mill
from tests.kit.stores import MINUTE, Backend, Measurement, metrics


@pytest.fixture
def both(backend: Backend, tmp_path: Path) -> Mill:
    """A mill on either backend."""
    return Mill(backend.open(), tmp_path / "checkpoint")


def test_a_file_holds_the_minutes_of_its_batch(tmp_path: Path) -> None:
    """By metric and column, as the batch has them; hours and days are left out."""
    one = mill(tmp_path)
    with one.store:
        batch = one.batch(*measurements(1))
        (batch_file,) = batch.outgoing
        (changes,) = one.outbox.read(batch_file.path)
        (deltas,) = [delta for delta in batch.deltas if delta.grain is Grain.MINUTE]
        assert changes.buckets == deltas.buckets
        assert changes.cells == deltas.cells
        expected = [batch.entities[number] for number in deltas.entities]
        assert [
            (entity.kind, entity.id, entity.name, entity.layers) for entity in changes.entities
        ] == [(entity.kind, entity.id, entity.name, entity.layers) for entity in expected]
        assert {
            metric.name: metric.columns for metric in changes.metrics
        } == one.writer.layout.columns
        assert batch_file.rows == len(deltas.buckets)
        assert batch_file.bytes == (one.outbox.folder / batch_file.path).stat().st_size


def test_a_column_that_metrics_share_is_read_back_for_each(tmp_path: Path) -> None:
    """And lies in the file once."""
    one = mill(tmp_path)
    with one.store:
        batch = one.writer.batch(measurements(1))
        (deltas,) = [delta for delta in batch.deltas if delta.grain is Grain.MINUTE]
        first, second = list(deltas.cells)[:2]
        (alone,) = one.outbox.write(batch, one.writer.layout)
        del deltas.cells[second]
        deltas.shared = {second: first}
        (shared,) = one.outbox.write(batch, one.writer.layout)
        assert shared.bytes < alone.bytes
        (changes,) = one.outbox.read(shared.path)
        assert changes.cells[second] == deltas.cells[first]


def test_a_batch_without_minutes_leaves_nothing(tmp_path: Path) -> None:
    """No file, and no row in the store."""
    one = mill(tmp_path)
    with one.store:
        one.commit()
        assert one.files() == one.named() == []


def test_a_commit_names_its_file_once(both: Mill) -> None:
    """A batch that comes again names nothing."""
    batch = both.batch(*measurements(0))
    assert both.store.commit(batch).applied
    assert not both.store.commit(batch).applied
    both.writer.number = 1
    both.commit(*measurements(1))
    assert both.named() == both.files()
    assert [file.seq for file in both.store.outbox(both.outbox.place)] == [1, 2]


def test_the_file_of_a_commit_that_failed_is_never_named(both: Mill) -> None:
    """It goes when the stream is claimed again; files of others' commits to come stay."""
    both.commit(*measurements(0))
    lost = both.batch(*measurements(1))
    other = Mill(both.store, both.checkpoint, stream="backfill-x")
    coming = other.batch(*measurements(2))
    assert lost.outgoing
    (coming_file,) = coming.outgoing
    both.outbox.tidy("live", set(both.named()))
    assert both.named() == [file for file in both.files() if file.startswith("live/")]
    assert coming_file.path in both.files()
    assert other.store.commit(coming).applied
    assert both.named() == both.files()


def test_what_a_stream_that_is_gone_left_is_removed_after_a_day(tmp_path: Path) -> None:
    """By whichever stream is claimed next."""
    one = mill(tmp_path)
    with one.store:
        left = Mill(one.store, one.checkpoint, stream="backfill-x").batch(*measurements(2))
        (left_file,) = left.outgoing
        day_ago = time.time() - 86_401
        file = one.outbox.folder / left_file.path
        os.utime(file, (day_ago, day_ago))
        one.outbox.tidy("live", set())
        assert one.files() == []
        os.utime(file.parent, (day_ago, day_ago))
        one.outbox.tidy("live", set())
        assert not file.parent.exists()


@pytest.mark.parametrize("bound", ["files", "bytes"])
def test_beyond_its_bound_the_oldest_go(backend: Backend, tmp_path: Path, bound: str) -> None:
    """Counted for each exporter that has not sent them, and for nobody else."""
    rows = measurements(0)
    probe = Mill(backend.open(), tmp_path / "probe", stream="probe").batch(*rows).outgoing[0]
    limits = {"max_files": 3} if bound == "files" else {"max_bytes": 3 * probe.bytes + 9}
    one = Mill(backend.open(), tmp_path / "checkpoint", OutboxSettings(**limits))
    place = one.outbox.place
    for exporter in ("slow", "quick"):
        assert one.store.join_outbox(exporter, place) == 0
    for _ in range(2):
        one.commit(*rows)
    one.store.pass_outbox("quick", place, [(1, probe.rows), (2, probe.rows)])
    for _ in range(4):
        one.commit(*rows)
    assert [file.seq for file in one.store.outbox(place)] == [4, 5, 6]
    assert one.named() == one.files()
    dropped = {
        source: n
        for (what, source, reason), n in one.store.counters().items()
        if (what, reason) == ("export dropped", "outbox full")
    }
    assert dropped == {"slow": 3 * probe.rows, "quick": probe.rows}


def test_without_an_exporter_files_wait_up_to_the_bound(both: Mill) -> None:
    """What goes then is counted, too."""
    one = Mill(both.store, both.checkpoint, OutboxSettings(max_files=1), stream="other")
    for number in range(3):
        one.commit(*measurements(number))
    assert len(one.files()) == 1
    counters = both.store.counters()
    rows = sum(len({(e.minute, e.entity) for e in measurements(number)}) for number in range(2))
    assert counters["export dropped", "(no exporter)", "outbox full"] == rows


def test_a_file_goes_when_every_exporter_has_passed_it(both: Mill) -> None:
    """Not before; and numbers go on from there, so that none is taken for one long passed."""
    store, place = both.store, both.outbox.place
    for exporter in ("one", "two"):
        store.join_outbox(exporter, place)
    both.commit(*measurements(0))
    (file,) = store.outbox(place)
    assert store.pass_outbox("one", place, [(file.seq, file.rows)]) == []
    assert store.pass_outbox("two", place, [(file.seq, file.rows)]) == [file.path]
    both.commit(*measurements(1))
    (after,) = store.outbox(place)
    assert after.seq > file.seq
    assert store.join_outbox("one", place) == file.seq


def test_counters_come_with_the_position_once(both: Mill) -> None:
    """Repeated after an answer that was lost, the call adds nothing."""
    store, place = both.store, both.outbox.place
    store.join_outbox("one", place)
    both.commit(*measurements(0))
    (file,) = store.outbox(place)
    for _ in range(2):
        store.pass_outbox("one", place, [(file.seq, file.rows)], {("sent", "one", ""): 7})
    assert store.counters()["sent", "one", ""] == 7


def test_a_file_that_went_while_it_was_sent_is_not_dropped(both: Mill) -> None:
    """It was counted when it went; the position takes that back."""
    one = Mill(both.store, both.checkpoint, OutboxSettings(max_files=1), stream="other")
    place = one.outbox.place
    one.store.join_outbox("one", place)
    one.commit(*measurements(0))
    (file,) = one.store.outbox(place)
    one.commit(*measurements(1))
    key = ("export dropped", "one", "outbox full")
    assert one.store.counters()[key] == file.rows
    one.store.pass_outbox("one", place, [(file.seq, file.rows)])
    assert one.store.counters()[key] == 0


def test_an_exporter_can_be_forgotten(both: Mill) -> None:
    """Nothing waits for it any more, and what it has not sent is counted."""
    store, place = both.store, both.outbox.place
    store.join_outbox("one", place)
    both.commit(*measurements(0))
    (file,) = store.outbox(place)
    assert store.leave_outbox("one", place) == [file.path]
    assert store.counters()["export dropped", "one", "exporter forgotten"] == file.rows
    assert store.exporters() == []
    with pytest.raises(UnknownNameError, match="one"):
        store.leave_outbox("one", place)


def test_outboxes_of_one_store_are_apart(both: Mill, tmp_path: Path) -> None:
    """Each pipeline's exporters have their own files and positions."""
    other = Mill(both.store, tmp_path / "other", stream="other")
    both.commit(*measurements(0))
    other.commit(*measurements(0))
    assert both.named() == both.files() != other.named() == other.files()
    assert Outbox.of(tmp_path / "other").place == other.outbox.place


def test_totals_are_the_values_of_the_given_minutes(both: Mill) -> None:
    """For all metrics of a source at once; rows that are not there are left out."""
    store = both.store
    both.commit(*measurements(0, 30))
    metrics = store.metrics()
    wanted = {MINUTE: {"id-one", "id-nobody"}, MINUTE + 1: {"id-two"}, MINUTE + 9: {"id-one"}}
    totals = store.totals(metrics, wanted)
    expected = {
        (value.bucket, value.entity_id): [
            next(
                total.value
                for total in store.values(metric)
                if (total.bucket, total.entity_id) == (value.bucket, value.entity_id)
            )
            for metric in metrics
        ]
        for value in store.values("calls")
        if value.entity_id in wanted.get(value.bucket, ())
    }
    assert totals == expected
    assert len(totals) == 2


def test_totals_know_an_entity_whose_id_is_cut(both: Mill) -> None:
    """The store keeps no id beyond 2,000 bytes; whoever asks need not know."""
    batch = both.batch(Measurement(5))
    long = "x" * 5000
    batch.entities = [EntityRow("endpoint", long, "long", frozenset(), {})]
    both.store.commit(batch)
    (metric,) = [metric for metric in both.store.metrics() if metric.name == "calls"]
    assert both.store.totals([metric], {MINUTE: {long}}) == {(MINUTE, long): [1]}


def test_a_metric_that_was_retired_has_a_total_as_long_as_it_is_kept(both: Mill) -> None:
    """Of another version with the same name it is not taken."""
    both.commit(Measurement(5))
    (old,) = [metric for metric in both.store.metrics() if metric.name == "calls"]
    both.store.register(metrics("calls = from(Endpoint.latency).sum();"), stream="live")
    (new,) = both.store.metrics()
    assert both.store.totals([old, new], {MINUTE: {"id-one"}}) == {(MINUTE, "id-one"): [1, None]}


def test_a_file_that_was_changed_is_reported(tmp_path: Path) -> None:
    """Cut short, or no such file at all."""
    one = mill(tmp_path)
    with one.store:
        batch = one.batch(*measurements(0))
        (batch_file,) = batch.outgoing
        path = one.outbox.folder / batch_file.path
        whole = path.read_bytes()
        for broken in (whole[: len(whole) // 2], b"", b"nonsense" * 100):
            path.write_bytes(broken)
            with pytest.raises(OutboxFileError, match="not a readable outbox file"):
                list(one.outbox.read(batch_file.path))


def test_a_file_that_cannot_be_removed_ends_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told, the others go, and it goes with the next claim of its stream."""
    one = mill(tmp_path)
    with one.store:
        for number in range(2):
            one.commit(*measurements(number))
        stuck, other = one.files()
        (one.outbox.folder / stuck).unlink()
        (one.outbox.folder / stuck).mkdir()
        one.outbox.remove([stuck, other])
    assert one.files() == [stuck]
    assert f"{stuck} stays until" in caplog.text


def test_there_is_no_outbox_where_no_pipeline_made_one(tmp_path: Path) -> None:
    """And the error says what to do."""
    with pytest.raises(NoOutboxError, match="--outbox"):
        Outbox.of(tmp_path)
