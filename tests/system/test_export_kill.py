"""The driver is killed again and again while an exporter sends what it commits."""

from __future__ import annotations

import random
from pathlib import Path

import grpc
import pytest

from tests.kit.jvm import java_missing

pytest.importorskip("pyspark")

from batchmill.outbox import Outbox
from batchmill.store import open_store
from tests.kit.exporters import NAME, QUICK, added_up, exporter_of, last_totals, running, stored
from tests.kit.otlp_receivers import GrpcReceiver, Verdict
from tests.kit.pipeline_results import differences, expected_whole, whole
from tests.kit.pipelines import MIXED_OAL, mixed_spool
from tests.kit.threads import until
from tests.system.test_pipeline_kill import Run, no_stacks_on_the_way, shots

__all__ = ["no_stacks_on_the_way"]

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(java_missing() is not None, reason=java_missing() or ""),
]

SUMMED = ("ep_count", "ep_codes", "relation_from")
"""Metrics whose increments add up."""
SOME = "\n".join(
    line
    for line in MIXED_OAL.splitlines()
    if line.split(" ")[0] in (*SUMMED, "ep_avg", "ep_percentile")
)
NOT_TAKEN = Verdict(grpc.StatusCode.UNAVAILABLE)
ANSWER_LOST = Verdict(grpc.StatusCode.UNAVAILABLE, taken=True)


def test_a_driver_killed_with_an_outbox_exports_every_commit(tmp_path: Path) -> None:
    """Killed inside and after commits, to a collector that loses answers: all arrives.

    Totals are the store's, which is the oracle's; increments, each commit's once, add up to them;
    nothing is counted as dropped, and no file is left.
    """
    rng = random.Random(11)
    events = mixed_spool(tmp_path / "spool", rng, typed=2, spans=2)
    url = f"sqlite:///{tmp_path / 'metrics.db'}"
    outbox = Outbox.open(tmp_path / "checkpoint")

    luck = random.Random(12)

    def judge(number: int) -> Verdict:
        return luck.choice((Verdict(), Verdict(), NOT_TAKEN, ANSWER_LOST))

    run = Run(tmp_path, url, outbox=True, oal=SOME)
    with open_store(url, ttl_days=365) as store, GrpcReceiver(judge) as receiver:
        with running(exporter_of(store, outbox, receiver.target, QUICK)):
            deaths = run.kill_at(shots(rng, at_any_time=0, making=0, inside=1, after=1, settling=1))
            until(lambda: not store.outbox(outbox.place))
        points = receiver.points()
        wanted = stored(store)
        counters = {key[0]: n for key, n in store.counters().items() if key[1] == NAME}
        files = len({each.commit for each in points if each.commit})
        assert last_totals(points) == wanted
        for name in SUMMED:
            total = {key: n for key, n in wanted.items() if key[0] == f"batchmill.{name}"}
            assert added_up(points, name) == total, name
            assert total
    assert len(deaths) == 3
    assert run.made_again, "no batch was lost and made again"
    assert {each.commit for each in points} - {""} == {
        f"{outbox.place}/{number}" for number in range(1, files + 1)
    }
    # That of a commit which was killed is removed by the next life.
    assert list(outbox.folder.glob("*/*.arrow")) == []
    assert counters.keys() == {"exported values", "export retries"}
    # The oracle knows nothing of exporters, nor of rows that no metric reads.
    others = {("counter", what) for what in (*counters, "unused")}
    found = {key: n for key, n in whole(url).items() if key[:2] not in others}
    assert differences(found, expected_whole(SOME, events)) == []
