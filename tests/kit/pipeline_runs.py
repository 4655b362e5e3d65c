"""More that the pipeline tests share: small scripts, segments in a chosen order, whole stores."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchmill.sources import Grain
from batchmill.store import Store, TopRecord, open_store
from tests.kit.pipelines import EVERY_FUNCTION, START, Stored, expected, stored
from tests.kit.stores import all_states
from tests.oracle.catalog import Row
from tests.oracle.generate import random_events
from tests.oracle.segments import to_table
from tests.oracle.topn import TopN, TopNKey, normalise

SMALL = """
ep_cpm = from(Endpoint.*).cpm();
ep_avg = from(Endpoint.latency).longAvg();
ep_p10 = from(Endpoint.latency).percentile2(10);
ep_types = from(Endpoint.*).labelCount(type, 2);
"""
"""A few metrics of one source: where a fact does not depend on the function."""

TWO_SOURCES = ("Endpoint", "ServiceInstanceJVMCPU")
EVERY_FUNCTION_OF_TWO = "\n".join(
    line
    for line in EVERY_FUNCTION.splitlines()
    if "Endpoint." in line or "JVMCPU" in line or line.startswith("disable")
)
"""Every function of the language, over two sources."""

MTIME = START.timestamp()

States = dict[tuple[Any, ...], tuple[Any, ...]]
Tops = dict[tuple[str, str, int, str], list[tuple[Any, ...]]]


def every_events(
    seed: int, names: Iterable[str], n: int, *, days: int = 3, late_share: float = 0.1
) -> dict[str, list[Row]]:
    """Random rows among which each filter of :data:`EVERY_FUNCTION` finds some."""
    events = random_events(seed, names, n, start=START, days=days, late_share=late_share)
    rng = random.Random(seed)
    for row in events.get("Endpoint", ()):
        if rng.random() < 0.3:
            row["tags"] = [*(row["tags"] or ()), "a:b"]
        if rng.random() < 0.3:
            row["tag"] = {**(row["tag"] or {}), "n": rng.choice(("7", "-7", "70000000000", "x"))}
        if rng.random() < 0.3:
            row["name"] = rng.choice(("/orders", "orders", "s"))
    return events


def endpoint_events(n: int, seed: int = 1, days: int = 2, start: datetime = START) -> list[Row]:
    """Rows of Endpoint."""
    return random_events(seed, ["Endpoint"], n, start=start, days=days)["Endpoint"]


def write_segment(
    folder: Path, source: str, rows: Sequence[Row], name: str = "0", order: int = 0
) -> Path:
    """One segment of the spool ``folder``; Spark takes those of a lower ``order`` first."""
    path = folder / source / f"{name}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(to_table(source, rows), path)
    set_order(path, order)
    return path


def set_order(path: Path, order: int) -> None:
    """When Spark takes a segment: it goes by the time of modification."""
    os.utime(path, (MTIME + order, MTIME + order))


def deal(
    events: Mapping[str, Sequence[Row]], folder: Path, pieces: int, seed: int = 0
) -> list[Path]:
    """Shuffle all rows, cut them into ``pieces`` segments in all, in any order of arrival."""
    rng = random.Random(seed)
    rows = [(source, row) for source in events for row in events[source]]
    rng.shuffle(rows)
    cuts = sorted(rng.sample(range(1, len(rows)), pieces - 1))
    orders = rng.sample(range(pieces), pieces)
    written = []
    for number, (start, end) in enumerate(zip([0, *cuts], [*cuts, len(rows)], strict=True)):
        for source in events:
            inside = [row for name, row in rows[start:end] if name == source]
            if inside:
                written.append(write_segment(folder, source, inside, str(number), orders[number]))
    return written


def contents(store: Store | str) -> tuple[States, Stored]:
    """All states and all values that a store holds."""
    if isinstance(store, str):
        with open_store(store) as opened:
            return contents(opened)
    return all_states(store), stored(store)


def sqlite(folder: Path) -> str:
    """The address of the store that a pipeline in ``folder`` has."""
    return f"sqlite:///{folder / 'metrics.db'}"


def expected_of(rows: Sequence[Row], oal: str = SMALL) -> Stored:
    """What the oracle expects of rows of Endpoint."""
    return expected({"Endpoint": rows}, oal)


def counted(store: Store, what: str) -> dict[tuple[str, str], int]:
    """One kind of counter, by source and reason."""
    return {key[1:]: n for key, n in store.counters().items() if key[0] == what}


def top_of(store: Store) -> Tops:
    """Every TopN list of a store, in its order."""
    found: Tops = {}
    for stream in store.top_streams():
        for grain in Grain:
            for each in store.top(stream, grain=grain):
                key = (stream, grain.value, each.bucket, each.entity_id)
                found.setdefault(key, []).append(_record(each))
    return found


def _record(each: TopRecord) -> tuple[Any, ...]:
    return (each.statement, each.latency, each.trace_id, each.runs, each.total_ms)


def top_expected(tops: Mapping[TopNKey, TopN]) -> Tops:
    """The same of the oracle."""
    return {
        key: [
            (each.statement, each.latency, each.trace_id, *top.runs[normalise(each.statement)])
            for each in top.records
        ]
        for key, top in tops.items()
    }


def quarantined(folder: Path) -> dict[str, str]:
    """The segments in a quarantine, each with its reason."""
    return {
        path.name.removesuffix(".reason"): path.read_text("utf-8").partition(":")[0]
        for path in folder.glob("*/*.reason")
    }


def quarantined_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows in a quarantine, each with its ``_reason``."""
    files: Iterable[Path] = sorted(folder.glob("*/rows-*/*.parquet"))
    moments = pa.timestamp("us", tz="UTC")
    rows = []
    for file in files:
        table = pq.read_table(file, coerce_int96_timestamp_unit="us")
        time = table["time"].cast(pa.timestamp("us")).cast(moments)
        rows += table.set_column(table.column_names.index("time"), "time", time).to_pylist()
    return rows
