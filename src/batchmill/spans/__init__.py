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
    from batchmill.spans.columns import backends_of, calls, calls_to, compact, serves
    from batchmill.spans.dedup import drop_duplicates, ids_of, merge_ids
    from batchmill.spans.hosts import MOST_HOSTS, KnownHosts
    from batchmill.spans.ids import combine, hash64, part_of
    from batchmill.spans.links import Links, link, read_summary
    from batchmill.spans.names import names_of_endpoint, normalise_name
    from batchmill.spans.sources import SERVED, TAGS, broker_rows, direct_rows, relation_rows
    from batchmill.spans.topn import merge_statements, merge_topn, statement_stats, topn_records

__all__ = [
    "MOST_HOSTS",
    "SERVED",
    "TAGS",
    "KnownHosts",
    "Links",
    "backends_of",
    "broker_rows",
    "calls",
    "calls_to",
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
    "names_of_endpoint",
    "normalise_name",
    "part_of",
    "read_summary",
    "relation_rows",
    "serves",
    "statement_stats",
    "topn_records",
]

_MODULES = {
    "columns": "backends_of calls calls_to compact serves",
    "dedup": "drop_duplicates ids_of merge_ids",
    "hosts": "MOST_HOSTS KnownHosts",
    "ids": "combine hash64 part_of",
    "links": "Links link read_summary",
    "names": "names_of_endpoint normalise_name",
    "sources": "SERVED TAGS broker_rows direct_rows relation_rows",
    "topn": "merge_statements merge_topn statement_stats topn_records",
}

__getattr__ = lazy_names(__name__, _MODULES, feature="the meaning of spans", extra="aggregate")
