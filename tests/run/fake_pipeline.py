"""A pipeline without Spark, for tests of ``batchmill run``.

``python fake_pipeline.py HOME [slow]`` counts the spans of each segment in the store, each span
once, and then removes the segment. With ``slow`` it reads nothing until SIGUSR1 comes.
"""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path

import pyarrow.parquet as pq

from batchmill.files import write_json
from batchmill.run import Home
from batchmill.store import Batch, open_store


def run(home: Home, go: threading.Event) -> None:
    """Count until SIGTERM comes."""
    end = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: end.set())
    signal.signal(signal.SIGUSR1, lambda *_: go.set())
    with open_store(home.store_url) as store:
        last = next(
            (stream.last_batch for stream in store.streams() if stream.name == "main"), None
        )
        claim = store.claim("main", "stand-in", fresh=last is None, committed=last)
        number = -1 if claim.last_batch is None else claim.last_batch
        sys.stdout.write("waiting for segments\n")
        sys.stdout.flush()
        seen: set[tuple[str, str]] = set()
        while not end.wait(0.05):
            for segment in sorted(home.spool.glob("Span/[!.]*.parquet")) if go.is_set() else ():
                number += 1
                ids = pq.read_table(segment, columns=["trace_id", "span_id"]).to_pylist()
                new = {(row["trace_id"], row["span_id"]) for row in ids} - seen
                seen |= new
                counters = {
                    ("rows", "Span", ""): len(new),
                    ("duplicates", "Span", "again"): len(ids) - len(new),
                }
                store.commit(Batch("main", claim.epoch, number, counters=counters))
                segment.unlink()
                home.checkpoint.mkdir(exist_ok=True)
                write_json(home.progress, {"last_batch": number, "spans": len(seen)})


if __name__ == "__main__":
    going = threading.Event()
    if "slow" not in sys.argv[2:]:
        going.set()
    run(Home(Path(sys.argv[1])), going)
