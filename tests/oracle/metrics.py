"""The expected value of every metric of a script, for every entity and bucket."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from tests.oracle.catalog import GRAINS, Grain, Row, bucket_of, entity_of
from tests.oracle.functions import Bucket, Value, final_value
from tests.oracle.rows import passes
from tests.oracle.script import Metric, read_script

# metric, grain, bucket, entity id
Key = tuple[str, Grain, int, str]
# grain, bucket, entity id
_Place = tuple[Grain, int, str]

_NO_THRESHOLDS: Mapping[str, int] = MappingProxyType({})


def expected_metrics(
    script_text: str,
    events: Mapping[str, Sequence[Row]],
    apdex_thresholds: Mapping[str, int] = _NO_THRESHOLDS,
) -> dict[Key, Value]:
    """What the store must hold once all of these rows are in, in whatever order they came."""
    metrics = read_script(script_text)
    placed = {
        source: [(row, _places(source, row)) for row in events.get(source, ())]
        for source in {metric.source for metric in metrics}
    }
    expected: dict[Key, Value] = {}
    for metric in metrics:
        for place, rows in _gather(metric, placed[metric.source]).items():
            minutes = GRAINS[place[0]][0]
            value = final_value(Bucket(metric, rows, minutes, apdex_thresholds))
            if value is not None:
                expected[(metric.name, *place)] = value
    return expected


def _places(source: str, row: Row) -> list[_Place]:
    """Where a row belongs: one bucket per grain."""
    entity = entity_of(source, row)
    return [(grain, bucket_of(row["time"], grain), entity) for grain in GRAINS]


def _gather(metric: Metric, placed: Sequence[tuple[Row, list[_Place]]]) -> dict[_Place, list[Row]]:
    gathered: defaultdict[_Place, list[Row]] = defaultdict(list)
    for row, places in placed:
        if passes(row, metric.filters):
            for place in places:
                gathered[place].append(row)
    return gathered
