"""A process that writes is killed at random moments: what it acknowledged is there, whole."""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

import pytest

from tests.kit.files import ROOT

pytest.importorskip("pyarrow")

import pyarrow.parquet as pq

from batchmill.spool import Spool
from tests.kit.events import numbers_in, segments, unfinished
from tests.kit.processes import SOURCE, Life
from tests.kit.threads import SOAK

WRITER = """
import itertools, os, sys, threading
from batchmill.spool import Spool
from tests.kit.events import spans

spool = Spool(sys.argv[1], linger_s=0.002, max_rows=500)
numbers = itertools.count()

def send():
    for _ in itertools.count():
        first = next(numbers) * 100
        spool.submit("Span", spans(range(first, first + 100))).result()
        os.write(1, b"%d\\n" % first)  # the sender has its answer

for _ in range(3):
    threading.Thread(target=send, daemon=True).start()
send()
"""


@pytest.mark.parametrize("life", range(3 * SOAK))
def test_what_was_acknowledged_survives_a_kill(tmp_path: Path, life: int) -> None:
    """Every acknowledged row is in a complete segment, once; unfinished ones are tidied away."""
    rng = random.Random(life)
    acknowledged = _kill_while_writing(tmp_path, answers=rng.randint(1, 40), rng=rng)
    written = numbers_in(segments(tmp_path))
    expected = {first + number for first in acknowledged for number in range(100)}
    assert expected
    assert expected <= set(written)
    assert len(written) == len(set(written))
    for path in segments(tmp_path):
        assert pq.ParquetFile(path).metadata.num_rows % 100 == 0  # a batch is there as a whole
    with Spool(tmp_path):
        assert unfinished(tmp_path) == []
    assert numbers_in(segments(tmp_path)) == written


def _kill_while_writing(folder: Path, answers: int, rng: random.Random) -> list[int]:
    """What a writer had acknowledged when it was killed, some time after so many answers."""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join((SOURCE, str(ROOT))))
    command = [sys.executable, "-c", WRITER, str(folder)]
    with Life(command, folder.parent / f"{folder.name}.log", environment) as writer:
        writer.must_hear(r"\d+", answers)
        time.sleep(rng.random() * 0.02)  # any moment of a segment's life
        writer.kill()
    return [int(line) for line in writer.lines]
