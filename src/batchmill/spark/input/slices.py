"""Cutting the segments of a batch into slices, each of which one task reads."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from batchmill.spark.input.segments import Segment

MOST = 8
"""So many slices at most: each one makes the query longer. With more cores, rows are shuffled."""
_UNEVEN = 1_000_000
"""With fewer segments than cores, so many rows may be left to one core."""


def cut(segments: Sequence[Segment], cores: int) -> list[list[Segment]]:
    """The segments in slices of about as many rows each, neighbours together; none if a slice for
    each core cannot be had, and it matters.

    Neighbours are of about the same time: the fewer minutes two slices share, the less there is to
    merge.
    """
    slices = min(cores, len(segments))
    rows = sum(each.rows for each in segments)
    if not slices or slices > MOST or (slices < cores and rows > slices * _UNEVEN):
        return []
    made: list[list[Segment]] = [[] for _ in range(slices)]
    for segment, after in zip(segments, accumulate(each.rows for each in segments), strict=True):
        middle = after - segment.rows / 2
        made[min(slices - 1, int(middle * slices // max(1, rows)))].append(segment)
    return [each for each in made if each]
