"""A pipeline in a process of its own, which says what it is doing; to be killed at any moment.

``python -m tests.kit.pipeline_driver JSON`` starts Spark, says ``ready``, waits for a line on its
standard input, so that a successor can be warm before its predecessor is dead. Then it processes
what the spool holds, lets go of all waiting spans, and ends. On its way it says::

    claim LAST              the stream is ours; LAST is the last batch in the store, or None
    batch N opened, M       its parts can be committed by tasks; M of them are committed already
    batch N making          the store does not have it yet
    batch N rerun K         K stages of its job were run more than once
    batch N made
    commit N begin          N is "settle" for the spans that are let go of in the end
    commit N merged         all is in the transaction; only its COMMIT is to come
    commit N end
    batch N replayed        Spark asked for it again, and the store has it
    done
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from batchmill.spark import BatchReport, BatchStats, Pipeline, PipelineSettings
from batchmill.spark.batch import job
from batchmill.spark.batch.maker import BatchMaker, Work
from batchmill.spark.runtime.session import Lease, lease
from batchmill.store import Batch, Claim, CommitResult, OpenParts, Store
from batchmill.store.sql.commit import Commit
from tests.kit.pipelines import NOW

SPAN_WAIT_S = 10 * 86400.0
"""No span's wait ends by itself."""


settling = threading.Event()
"""All is read; what comes now are the spans that wait."""


def _name(number: int) -> str:
    return "settle" if settling.is_set() else str(number)


def say(what: str) -> None:
    """One line, out at once."""
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


def lease_session(conf: dict[str, str], master: str = "local[2]") -> Lease:
    """A Spark session that the pipelines of this process find, until it is released."""
    return lease(master, conf=conf)


def main(given: dict[str, Any]) -> None:
    """Run the pipeline that the arguments describe."""
    folder = Path(given["folder"])
    master = given.get("master", "local[2]")
    session = lease_session(given["conf"], master)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(Store, "claim", _claiming(Store.claim)))
        stack.enter_context(mock.patch.object(Store, "commit", _committing(Store.commit)))
        opening = _opening(Store.begin_parts)
        stack.enter_context(mock.patch.object(Store, "begin_parts", opening))
        record = _recording(Commit._record, given["linger_at"])
        stack.enter_context(mock.patch.object(Commit, "_record", record))
        stack.enter_context(mock.patch.object(BatchMaker, "make", _making(BatchMaker.make)))
        if "task_bytes" in given:
            stack.enter_context(mock.patch.object(job, "_BYTES_PER_TASK", given["task_bytes"]))
        say("ready")
        stack.callback(session.release)
        if not sys.stdin.readline():
            return
        pipeline = stack.enter_context(
            Pipeline(
                oal=given["oal"],
                spool=None if given.get("source") else given.get("spool", folder / "spool"),
                source=given.get("source"),
                store=given["store"],
                checkpoint=given.get("checkpoint", folder / "checkpoint"),
                # It finds the session that is there.
                master=master,
                settings=PipelineSettings(
                    ttl_days=365,
                    span_wait_s=SPAN_WAIT_S,
                    max_batch_files=given["batch_files"],
                    max_batch_messages=given.get("batch_messages", 200_000),
                ),
                clock=lambda: NOW,
                on_batch=_tell,
                dedup_s=given.get("dedup_s"),
                remove_read=given.get("remove_read", False),
                outbox=given.get("outbox", False),
            )
        )
        pipeline.run_available()
        settling.set()
        pipeline.settle(everything=True)
    say("done")


def _tell(report: BatchReport) -> None:
    if not report.applied:
        say(f"batch {report.number} replayed")


def _claiming(claim: Callable[..., Claim]) -> Callable[..., Claim]:
    def marked(self: Store, *args: Any, **kwargs: Any) -> Claim:
        got = claim(self, *args, **kwargs)
        say(f"claim {got.last_batch}")
        return got

    return marked


def _opening(begin: Callable[..., OpenParts]) -> Callable[..., OpenParts]:
    def marked(self: Store, stream: str, epoch: int, number: int, **more: Any) -> OpenParts:
        opened = begin(self, stream, epoch, number, **more)
        say(f"batch {number} opened, {len(opened.recorded)}")
        return opened

    return marked


def _committing(
    commit: Callable[[Store, Batch], CommitResult],
) -> Callable[[Store, Batch], CommitResult]:
    def marked(self: Store, batch: Batch) -> CommitResult:
        say(f"commit {_name(batch.number)} begin")
        result = commit(self, batch)
        say(f"commit {_name(batch.number)} end")
        return result

    return marked


def _recording(record: Callable[..., None], linger_at: str) -> Callable[..., None]:
    """The number is the last that a commit writes; then it may linger, as on a slow disk."""

    def marked(self: Commit, session: Any, *more: Any) -> None:
        record(self, session, *more)
        moment = f"commit {_name(self._batch.number)} merged"
        say(moment)
        if re.fullmatch(linger_at, moment):
            # Until it is killed; or until whoever was to kill it is gone.
            sys.stdin.read()

    return marked


def _making(
    make: Callable[[BatchMaker, Work], tuple[Batch, BatchStats]],
) -> Callable[[BatchMaker, Work], tuple[Batch, BatchStats]]:
    def marked(self: BatchMaker, work: Work) -> tuple[Batch, BatchStats]:
        say(f"batch {_name(work.number)} making")
        before = _stages_run_again(self)
        made = make(self, work)
        if again := _stages_run_again(self) - before:
            say(f"batch {_name(work.number)} rerun {again}")
        say(f"batch {_name(work.number)} made")
        return made

    return marked


def _stages_run_again(maker: BatchMaker) -> int:
    """How many stages of all jobs so far were run more than once."""
    tracker = maker._spark.sparkContext.statusTracker()
    jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup()]
    stages = [tracker.getStageInfo(stage) for job in jobs if job for stage in job.stageIds]
    return sum(stage is not None and stage.currentAttemptId > 0 for stage in stages)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
