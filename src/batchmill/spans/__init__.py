"""What spans mean: from spans as Arrow tables to rows of event types, with NumPy and Arrow.

:func:`compact` looks up the attributes once; all other steps use its columns. :func:`direct_rows`
are the rows that single spans give; :func:`link` pairs spans with their parents and children, in
other batches, too; :func:`drop_duplicates` drops spans that were delivered before;
:func:`topn_records` and :func:`statement_stats` are about the statements of databases and caches.
No Spark is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchmill.extras import lazy_names

if TYPE_CHECKING:
    from batchmill.spans.columns import calls, compact, serves
    from batchmill.spans.dedup import drop_duplicates, ids_of, merge_ids
    from batchmill.spans.ids import combine, hash64, part_of
    from batchmill.spans.links import Links, link, read_summary
    from batchmill.spans.sources import SERVED, TAGS, broker_rows, direct_rows, relation_rows
    from batchmill.spans.topn import merge_statements, merge_topn, statement_stats, topn_records

__all__ = [
    "SERVED",
    "TAGS",
    "Links",
    "broker_rows",
    "calls",
    "combine",
    "compact",
    "direct_rows",
    "drop_duplicates",
    "hash64",
    "ids_of",
    "link",
    "merge_ids",
    "merge_statements",
    "merge_topn",
    "part_of",
    "read_summary",
    "relation_rows",
    "serves",
    "statement_stats",
    "topn_records",
]

_MODULES = {
    "columns": "calls compact serves",
    "dedup": "drop_duplicates ids_of merge_ids",
    "ids": "combine hash64 part_of",
    "links": "Links link read_summary",
    "sources": "SERVED TAGS broker_rows direct_rows relation_rows",
    "topn": "merge_statements merge_topn statement_stats topn_records",
}

__getattr__ = lazy_names(__name__, _MODULES, feature="spans", extra="aggregate")
