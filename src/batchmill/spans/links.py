"""Finds which service called which: pairs spans with their parents and children across batches.

A relation takes two spans, and they may arrive in different batches. So each batch keeps a summary
of its spans, which later batches read for as long as spans wait:

- A span that serves pairs with its parent in the batch in which the later of the two arrives. If
  the parent is a call or of another service, that is a relation as the server saw it (SERVER); if
  the parent is a call, it is also one as the caller saw it (CLIENT). A call that three services
  serve thus relates to each of them, and one that its own service serves is a call to itself.
- A call to a database, a cache or a broker relates to that (its ``peer``) at once, as the caller
  saw it. If somebody serves it all the same, such as the consumer of a message, that is a relation
  as the server saw it only: a call counts once for its caller.
- A call to a host outside that has never answered, or to a silent destination (:mod:`.hosts`),
  relates to that at once, too. If somebody serves it all the same, in a later batch, that is a
  relation as the server saw it only; and the host answers from then on: calls to it wait as others
  do.
- A call that nobody has served until its summary expires went where the caller itself says (its
  ``peer``).
- A message that is consumed pairs with the span that sent it in the same way; how long it took is
  known then. Without that span it counts as consumed when it expires.
- A span that serves and whose parent has not arrived by then came from outside, as one without a
  parent does. Any span without a partner by then is counted as unresolved.

Each delivered row counts once, whatever the split into batches: a served request that was delivered
twice counts twice, on both sides, as in all other event types; a call that was delivered twice
counts twice only if nobody served it; one to a database, a cache or a broker counts as often as it
was delivered. The *other* span of a pair is looked up by (trace id, span id), however often it was
delivered; if different spans share an id, the first to start counts. A span without these ids can
never be paired, and does not wait.

This works because a summary never changes. A row that waits since batch 3 has been paired exactly
if a partner is among the pending rows: it arrived after batch 3, so it has not expired. That is why
rows must expire oldest first, and why rows that expire now still have to be passed in.

A summary has only what a later batch can need. Any span with ids, of any kind, may be the parent of
one that serves and arrives later, and a span that serves answers a call that arrives later. So rows
are left out only if they have no trace id, or neither a span id nor a parent to wait for. And
columns are null where nobody will read them: ``parent_span_id`` except of spans that serve, whose
parents alone are looked up; ``peer`` except of calls that wait, and of those that were counted at
once for who may answer; ``broker`` and ``broker_endpoint`` except of messages whose sender is
missing, as the others have been counted; what was measured, except of spans that wait and of calls,
which alone are measured as parents. The last changes no choice between spans with one id, as that
looks at the kind before it looks at what was measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchmill.spans.columns import calls, serves
from batchmill.spans.hosts import KnownHosts
from batchmill.spans.texts import TEXT, Longs, Mask, Texts, at, one_array

_IDS = ("trace_id", "span_id", "parent_span_id")
_INT, _FLAG, _TIME = pa.int32(), pa.bool_(), pa.timestamp("us", tz="UTC")
SUMMARY_SCHEMA = pa.schema(
    {
        **dict.fromkeys((*_IDS, "name", "kind"), pa.string()),
        "time": _TIME,
        "latency": _INT,
        "latencyMicros": pa.int64(),
        "status": _FLAG,
        **dict.fromkeys(("service", "instance", "type"), pa.string()),
        "httpResponseStatusCode": _INT,
        "rpcStatusCode": pa.string(),
        **dict.fromkeys(("peer", "peer_layer", "broker", "broker_endpoint"), pa.string()),
        "counted": _FLAG,
        "batch": pa.int64(),
        "settled": _FLAG,
    }
)
"""The summary of a span that is kept until its partners have arrived. Files of older versions may
lack columns, which are then null. The first columns are from :func:`.columns.compact`; ``counted``
means that a call was counted at once for who may answer; ``batch`` is the one the span arrived in;
``settled`` means that it waits for no partner of its own, though it can still be the partner of
another span. In tables, texts other than ids are dictionaries."""

_SPAN_TYPES = {
    field.name: TEXT if field.type == pa.string() and field.name not in _IDS else field.type
    for field in list(SUMMARY_SCHEMA)[:-2]
}
_MEASURED = (
    *("time", "latency", "status", "type", "httpResponseStatusCode", "rpcStatusCode"),
    "latencyMicros",
)
_PARENT_COLUMNS = ("time", "service", "instance", "name", "kind", *_MEASURED[1:], "peer_layer")
"""If different spans share an id, the least by these columns is the parent, null before all."""

_NO_PARTNER = ("VIRTUAL_DATABASE", "VIRTUAL_CACHE", "VIRTUAL_MQ")
"""The layers of what is called and sends no spans."""
_BY_ADDRESS = ("UNDEFINED", "VIRTUAL_GENAI")
"""The layers of what may be a host outside."""
_LEAST = np.iinfo(np.int64).min


@dataclass(frozen=True)
class Links:
    """The result of pairing the spans of one batch."""

    relations: pa.Table
    """The calls of this batch; see :func:`.sources.relation_rows`."""
    accessed: pa.Table
    """The messages that were sent or consumed; see :func:`.sources.broker_rows`."""
    summary: pa.Table
    """This batch's spans for later batches, with the columns of :data:`SUMMARY_SCHEMA`."""
    unresolved: Counter[str]
    """How many spans have no partner, or never can, by reason."""
    answered: frozenset[str]
    """The destinations that somebody has answered for."""
    given_up: frozenset[str]
    """Those of calls that nobody has answered until they expired."""


def link(
    new: pa.Table,
    pending: pa.Table | None,
    batch: int,
    expire_before: int | None = None,
    hosts: KnownHosts | None = None,
) -> Links:
    """Pair the spans of a batch with each other and with those of earlier batches.

    ``new`` comes from :func:`.columns.compact`; ``pending`` has the summaries of earlier batches,
    including those that expire now: of batches up to ``expire_before``. To expire everything, pass
    an empty ``new`` and the highest number. Both have all spans of their traces. ``hosts`` is what
    earlier batches have learned; None: nothing is known, and calls to any host wait.
    """
    known = _Known.of(new, pending, expire_before)
    columns, fresh = known.columns, known.fresh
    spans = pa.table(columns)
    is_serving, is_calling = serves(spans), calls(spans)
    layer = Texts.of(columns["peer_layer"])
    no_partner = layer.one_of(*_NO_PARTNER)
    traced, identified = _present(columns["trace_id"]), _present(columns["span_id"])
    is_child = is_serving & _present(columns["parent_span_id"])
    parents = _find_parents(columns, np.flatnonzero(is_child & traced), fresh)

    # Rows settled on arrival have nothing more to count.
    met = parents.rows >= 0
    pairs_now = is_child & met & known.waits & (fresh | ~parents.known)
    may_answer = is_calling & ~no_partner
    peer = Texts.of(columns["peer"])
    counted = np.zeros(len(spans), np.bool_)
    if hosts is not None:
        outside = layer.one_of(*_BY_ADDRESS) & peer.meet(_each(hosts.is_outside))
        silent = outside | peer.meet(_each(hosts.is_silent))
        counted = may_answer & silent & fresh & ~parents.served
    at_once = (is_calling & no_partner & fresh) | counted
    hopeless = fresh & ~(traced & (is_child | identified))
    answered = np.where(is_child, met, ~is_calling | at_once | parents.served)
    given_up = known.waits & (hopeless | known.expired) & ~answered

    children = np.flatnonzero(pairs_now)
    callers = parents.rows[children]
    service = Texts.of(columns["service"]).codes
    pairs = (service[callers] != service[children]) | is_calling[callers]
    relations = _relations(
        columns,
        users=np.flatnonzero((fresh & is_serving & ~is_child) | (given_up & is_child)),
        children=children[pairs],
        callers=callers[pairs],
        seen_by_caller=may_answer[callers[pairs]] & ~parents.counted[children[pairs]],
        to_peer=np.flatnonzero(at_once | (given_up & ~is_child & peer.present)),
    )
    sends = is_calling & layer.one_of("VIRTUAL_MQ")
    accessed = _accessed(
        columns,
        np.flatnonzero(
            _present(columns["broker"]) & np.where(is_child, pairs_now | given_up, fresh)
        ),
        np.where(pairs_now & sends[parents.rows], parents.rows, -1),
    )
    lost = {
        "parent never came": given_up & is_child,
        "no destination": given_up & ~is_child & ~peer.present,
    }
    summary = _summary(
        {name: column.slice(0, len(new)) for name, column in columns.items()},
        batch,
        settled=(hopeless | answered)[: len(new)],
        is_child=is_child[: len(new)],
        is_calling=is_calling[: len(new)],
        counted=counted[: len(new)],
    )
    unresolved = {reason: int(np.count_nonzero(mask)) for reason, mask in lost.items()}
    return Links(
        relations,
        accessed,
        summary,
        +Counter(unresolved),
        answered=_distinct(peer, callers[may_answer[callers]]),
        given_up=_distinct(peer, np.flatnonzero(given_up & known.expired & ~is_child)),
    )


def read_summary(table: pa.Table) -> pa.Table:
    """A summary from a file of any version, with the columns and the types of this one's."""
    columns = {name: _column(table, name, kind) for name, kind in _SPAN_TYPES.items()}
    return pa.table(columns | {name: table[name] for name in ("batch", "settled")})


def _each(test: Callable[[str], bool]) -> Callable[[pa.Array], pa.Array]:
    return lambda texts: pa.array([test(text) for text in texts.to_pylist()], pa.bool_())


def _distinct(texts: Texts, rows: Longs) -> frozenset[str]:
    """The texts of these rows, each once."""
    codes = np.unique(texts.codes[rows])
    return frozenset(texts.values.take(pa.array(codes[codes >= 0])).to_pylist())


@dataclass(frozen=True)
class _Known:
    """The new spans, then the pending ones of traces in which something can change now."""

    columns: Mapping[str, pa.Array]
    fresh: Mask
    """Which of them are new."""
    waits: Mask
    """Which of them wait for a partner, all new ones for now."""
    expired: Mask

    @classmethod
    def of(cls, new: pa.Table, pending: pa.Table | None, expire_before: int | None) -> _Known:
        columns = {name: _column(new, name, kind) for name, kind in _SPAN_TYPES.items()}
        waits, expired = np.ones(len(new), np.bool_), np.zeros(len(new), np.bool_)
        old = None if pending is None else _touched(columns["trace_id"], pending, expire_before)
        if old is not None and len(old):
            for name, kind in _SPAN_TYPES.items():
                columns[name] = pa.concat_arrays([columns[name], _column(old, name, kind)])
            waits = np.concatenate([waits, _flags(_waiting(old))])
            expired = np.concatenate([expired, _flags(_expired(old, expire_before))])
        return cls(columns, np.arange(len(waits)) < len(new), waits, expired)


def _touched(traces: pa.Array, pending: pa.Table, expire_before: int | None) -> pa.Table:
    """The pending rows of these traces, and of those of which a row expires that still waits."""
    ids = pending["trace_id"]
    due = pc.and_kleene(_expired(pending, expire_before), _waiting(pending))
    if pc.any(due).as_py():
        more = ids.filter(due).cast(pa.string()).combine_chunks()
        traces = pa.concat_arrays([traces, more])
    # No id is none: it matches nothing.
    return pending.filter(pc.is_in(ids, value_set=traces.unique(), skip_nulls=True))


def _waiting(pending: pa.Table) -> pa.ChunkedArray:
    return pc.invert(pending["settled"])


def _expired(pending: pa.Table, expire_before: int | None) -> pa.ChunkedArray:
    if expire_before is None:
        return pa.chunked_array([pa.repeat(False, len(pending))])
    return pc.less_equal(pending["batch"], expire_before)


@dataclass(frozen=True)
class _Parents:
    """What is known about the parents and the children of spans, one value for each span."""

    rows: Longs
    """The row of its parent, -1 without one."""
    known: Mask
    """Whether its parent arrived in an earlier batch."""
    served: Mask
    """Whether it is the parent of a span that serves."""
    counted: Mask
    """Whether its parent was counted at once, as a call to a host that has not answered."""


def _find_parents(columns: Mapping[str, pa.Array], children: Longs, fresh: Mask) -> _Parents:
    """Look up the parents of ``children``, which are spans with a trace id and a parent's id."""
    result = _Parents(np.full(len(fresh), -1), *(np.zeros(len(fresh), np.bool_) for _ in range(3)))
    # A trace id and a span id are a number each, and both together one: exact, unlike a hash.
    traces = _filled(columns["trace_id"].dictionary_encode().indices, -1)
    sought = columns["parent_span_id"].take(children).dictionary_encode()
    span_ids = _filled(pc.index_in(columns["span_id"], value_set=sought.dictionary), -1)
    # Without a trace id, both together are below 0, and like nothing that is sought.
    rows = np.flatnonzero(span_ids >= 0)
    size = len(sought.dictionary)
    keys = pa.array(traces[children] * size + _filled(sought.indices, -1)).dictionary_encode()
    groups = _filled(
        pc.index_in(pa.array(traces[rows] * size + span_ids[rows]), value_set=keys.dictionary), -1
    )
    rows, groups = rows[groups >= 0], groups[groups >= 0]
    result.served[rows] = True

    group_of_child = _filled(keys.indices, -1)
    firsts = _firsts(columns, rows, groups, len(keys.dictionary))
    result.rows[children] = firsts[group_of_child]
    known = np.zeros(len(keys.dictionary), np.bool_)
    known[groups[~fresh[rows]]] = True
    result.known[children] = known[group_of_child]
    counted = np.zeros(len(keys.dictionary), np.bool_)
    counted[groups[_flags(columns["counted"])[rows]]] = True
    result.counted[children] = counted[group_of_child]
    return result


def _firsts(columns: Mapping[str, pa.Array], rows: Longs, groups: Longs, size: int) -> Longs:
    """The row of each group that counts, by :data:`_PARENT_COLUMNS`; -1 for groups without rows."""
    firsts = np.full(size, -1)
    firsts[groups] = rows
    several = np.bincount(groups, minlength=size)[groups] > 1
    if several.any():
        rows, groups = rows[several], groups[several]
        ranks = [_ranks(columns[name].take(pa.array(rows))) for name in _PARENT_COLUMNS]
        # The last key is the first to sort by; of several assignments the last one stays.
        order = np.lexsort([*reversed(ranks), groups])[::-1]
        firsts[groups[order]] = rows[order]
    return firsts


def _relations(
    columns: Mapping[str, pa.Array],
    *,
    users: Longs,
    children: Longs,
    callers: Longs,
    seen_by_caller: Mask,
    to_peer: Longs,
) -> pa.Table:
    """The rows of relations: to a peer, of pairs as either side saw them, and from a user.

    ``callers`` are the parents of ``children``, and ``seen_by_caller`` says which of these pairs
    are also relations as the caller saw them.
    """
    answers, answered = children[seen_by_caller], callers[seen_by_caller]
    as_caller, from_user = len(to_peer) + len(answers), len(users)

    def take(name: str, *rows: Longs) -> pa.Array:
        return columns[name].take(pa.array(np.concatenate(rows)))

    def source(name: str) -> pa.Array:
        return pa.concat_arrays(
            [take(name, to_peer, answered, callers), _constant("User", from_user)]
        )

    def dest(name: str, peer: str) -> pa.Array:
        return pa.concat_arrays([take(peer, to_peer), take(name, answers, children, users)])

    return pa.table(
        {
            "detectPoint": pa.concat_arrays(
                [_constant("CLIENT", as_caller), _constant("SERVER", len(children) + from_user)]
            ),
            "sourceService": source("service"),
            "sourceInstance": source("instance"),
            "sourceLayer": pa.concat_arrays(
                [_constant("GENERAL", as_caller + len(children)), _constant("UNDEFINED", from_user)]
            ),
            "destService": dest("service", "peer"),
            "destInstance": dest("instance", "peer"),
            "destLayer": pa.concat_arrays(
                [
                    take("peer_layer", to_peer),
                    _constant("GENERAL", len(answers) + len(children) + from_user),
                ]
            ),
            "endpoint": take("name", to_peer, answers, children, users),
            "sourceEndpoint": pa.concat_arrays(
                [pa.nulls(as_caller, TEXT), take("name", callers), pa.nulls(from_user, TEXT)]
            ),
            "ofEndpoints": np.repeat([False, True, False], [as_caller, len(children), from_user]),
            **{name: take(name, to_peer, answered, children, users) for name in _MEASURED},
        }
    )


def _accessed(columns: Mapping[str, pa.Array], rows: Longs, senders: Longs) -> pa.Table:
    """The messages in ``rows``; ``senders`` has the row of what sent each span's, or -1."""
    senders = senders[rows]
    times = _filled(columns["time"].cast(pa.int64()), 0)
    on_the_way = np.maximum(times[rows] - times[senders], 0) // 1000
    names = ("time", "broker", "broker_endpoint", "kind", "status")
    taken = {name: columns[name].take(pa.array(rows)) for name in names}
    return pa.table(taken | {"on_the_way": pa.array(on_the_way, mask=senders < 0)})


def _summary(
    columns: Mapping[str, pa.Array],
    batch: int,
    *,
    settled: Mask,
    is_child: Mask,
    is_calling: Mask,
    counted: Mask,
) -> pa.Table:
    """What later batches need of the new spans; see above."""
    needed: dict[str, Mask] = {
        "parent_span_id": is_child,
        "peer": is_calling & (~settled | counted),
        **dict.fromkeys(("broker", "broker_endpoint"), is_child & ~settled),
        **dict.fromkeys(_MEASURED[1:], is_calling | ~settled),
    }
    table = pa.table(
        {
            name: _nulled(column, needed[name]) if name in needed else column
            for name, column in columns.items()
        }
        | {"counted": pa.array(counted)}
        | {"batch": np.full(len(settled), batch, np.int64), "settled": settled}
    )
    kept = _present(columns["trace_id"]) & (is_child | _present(columns["span_id"]))
    return table if kept.all() else table.filter(pa.array(kept))


def _column(table: pa.Table, name: str, kind: pa.DataType) -> pa.Array:
    """A column in one piece, of this type; null if the table does not have it."""
    if name not in table.column_names:
        return pa.nulls(len(table), kind)
    if kind == TEXT:
        return Texts.of(table[name]).array()
    array = one_array(table[name])
    return array if array.type == kind else array.cast(kind)


def _constant(text: str, rows: int) -> pa.Array:
    return Texts.chosen(np.zeros(rows), text).array()


def _nulled(array: pa.Array, needed: Mask) -> pa.Array:
    """The array with null where it is not needed."""
    if array.null_count == len(array):
        return array
    if array.type == TEXT:
        return Texts.of(array).where(needed).array()
    return pc.if_else(pa.array(needed), array, pa.scalar(None, array.type))


def _present(array: pa.Array) -> Mask:
    if array.null_count in (0, len(array)):
        return np.full(len(array), not array.null_count)
    return _flags(array.is_valid())


def _flags(array: pa.Array | pa.ChunkedArray) -> Mask:
    """As NumPy's booleans; null is false."""
    return np.asarray(pc.fill_null(array, False), np.bool_)


def _filled(array: pa.Array, null: int) -> Longs:
    """As NumPy's 64-bit numbers, with one of them for null."""
    return np.asarray(pc.fill_null(array, null), np.int64)


def _ranks(array: pa.Array) -> Longs:
    """Numbers in the order of the values; null before all."""
    if array.type == TEXT:
        texts = Texts.of(array)
        return at(_filled(pc.rank(texts.values), 0), texts.codes, -1)
    return _filled(array.cast(pa.int64()), _LEAST)
