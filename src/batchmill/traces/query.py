"""What a search for traces asks of spans, and which rows of a file meet it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchmill.spool import ATTRIBUTE_COLUMNS
from batchmill.traces.files import OpenFile, RowGroup
from batchmill.traces.layout import MAPS
from batchmill.traces.trace import ROUTE

Mask: TypeAlias = npt.NDArray[np.bool_]

_CALLING = ("CLIENT", "PRODUCER")
_PLACE = re.compile(r"\[?(?P<host>.+?)\]?(?::[0-9]+)?")


class SpanMeaning(Protocol):
    """What spans mean for metrics. :mod:`batchmill.spans` knows it, which lies above this package.

    Without it, names are only compared as they are.
    """

    def endpoint(self, name: str, *, has_route: bool) -> str:
        """The endpoint of a span with that name; ``has_route``: whether it has ``http.route``."""

    def names_of_endpoint(self, names: pa.Array, endpoint: str) -> Sequence[bool]:
        """Which other names are that endpoint, of spans without ``http.route``."""

    def calls_to(self, spans: pa.Table, place: str) -> Mask:
        """Which spans call a place, or process a message of it.

        ``spans`` has ``kind``, ``name``, and columns of :data:`.spool.ATTRIBUTE_COLUMNS`.
        """


@dataclass(frozen=True, kw_only=True)
class TraceQuery:
    """Which traces to find: those that have a span to which all of it applies."""

    start_us: int
    """Spans that began from then on, in microseconds since 1970."""
    end_us: int
    service: str | None = None
    name: str | None = None
    """The name of the span, or of the endpoint that it is for metrics."""
    kind: str | None = None
    error: bool | None = None
    status: str | None = None
    """``OK``, ``ERROR`` or ``UNSET``."""
    status_message: str | None = None
    min_us: int | None = None
    max_us: int | None = None
    attributes: Mapping[str, str] = field(default_factory=dict)
    """Of the span, or of its resource."""
    peer: str | None = None
    """What the span calls, by its name in metrics, or the broker whose message it processes. With a
    service only its calls, unless ``kind`` is CONSUMER."""
    limit: int = 20


def mask_of(
    file: OpenFile, group: RowGroup, query: TraceQuery, meaning: SpanMeaning | None = None
) -> Mask:
    """To which rows of a group a query applies; the cheapest columns are read first."""
    mask = np.ones(group.rows, np.bool_)
    if group.first_us < query.start_us or group.last_us > query.end_us:
        times = file.read(group, ["time"])["time"].cast(pa.int64()).to_numpy()
        mask &= (times >= query.start_us) & (times <= query.end_us)
    rows = _Rows(file, group)
    columns = ("service", "kind", "status", "status_message")
    texts = {column: getattr(query, column) for column in columns}
    if query.error is not None:
        status = is_in(file.read(group, ["status"])["status"], pa.array(["ERROR"]))
        mask &= status if query.error else ~status
    for column, text in texts.items():
        if text is not None and mask.any():
            mask &= is_in(file.read(group, [column])[column], pa.array([text]))
    if query.name is not None and mask.any():
        mask &= _is_named(file.read(group, ["name"])["name"], query.name, rows, meaning)
    if (query.min_us is not None or query.max_us is not None) and mask.any():
        took = file.read(group, ["duration_us"])["duration_us"].to_numpy()
        if query.min_us is not None:
            mask &= took >= query.min_us
        if query.max_us is not None:
            mask &= took <= query.max_us
    for key, text in query.attributes.items():
        has = np.zeros(group.rows, np.bool_)
        for name in MAPS:
            if mask.any() and rows.may_have(name, [key]):
                has |= _has_pair(rows.map(name), key, text)
        mask &= has
    if query.peer is not None and mask.any():
        if meaning is None:
            raise ValueError("a search for a peer takes a reader that knows what spans mean")
        _keep_calls(mask, query, query.peer, rows, meaning)
    return mask


class _Rows:
    """The rows of a group, whose maps are read once, if they are needed at all."""

    def __init__(self, file: OpenFile, group: RowGroup) -> None:
        self._file = file
        self._group = group
        self._maps: dict[str, pa.Array] = {}

    def may_have(self, name: str, keys: Collection[str]) -> bool:
        """Whether a map may have one of these keys, by what the file says."""
        present = self._file.keys.get(name)
        return present is None or not present.isdisjoint(keys)

    def map(self, name: str) -> pa.Array:
        """A map of all rows."""
        if name not in self._maps:
            self._maps[name] = one(self._file.read(self._group, [name])[name])
        return self._maps[name]

    def are_of_kind(self, kinds: Collection[str]) -> Mask:
        """Which rows are of one of these kinds."""
        return is_in(self._file.read(self._group, ["kind"])["kind"], pa.array(kinds))

    def calls(self, places: npt.NDArray[np.int64]) -> pa.Table:
        """Some rows, as :meth:`SpanMeaning.calls_to` takes them."""
        attributes = self.map("attributes")
        table = self._file.read(self._group, ["kind", "name"]).take(pa.array(places))
        place_of = np.full(len(attributes), -1)
        place_of[places] = np.arange(len(places))
        for key, column in ATTRIBUTE_COLUMNS.items():
            if self.may_have("attributes", [key]):
                entries = _entries(attributes, is_in(_chunked(attributes.keys), pa.array([key])))
                wanted = place_of[_rows_at(attributes, entries)]
                entry_of = np.full(len(places), -1)
                entry_of[wanted[wanted >= 0]] = entries[wanted >= 0]
                texts = attributes.items.take(pa.array(entry_of, mask=entry_of < 0))
                table = table.append_column(column, texts)
        return table


def _is_named(
    names: pa.ChunkedArray, wanted: str, rows: _Rows, meaning: SpanMeaning | None
) -> Mask:
    """Which rows have this name, or one with ids that is this endpoint."""
    mask = is_in(names, pa.array([wanted]))
    if meaning is None:
        return mask
    distinct = names.unique().cast(pa.string()).drop_null()
    others = distinct.filter(pa.array(meaning.names_of_endpoint(distinct, wanted), pa.bool_()))
    if len(others):
        more = is_in(names, others)
        if rows.may_have("attributes", [ROUTE]):
            more &= ~_has_text(rows.map("attributes"), ROUTE)
        mask |= more
    return mask


def _keep_calls(
    mask: Mask, query: TraceQuery, peer: str, rows: _Rows, meaning: SpanMeaning
) -> None:
    """Take rows out of the mask that do not call the peer."""
    calls_only = query.service is not None and query.kind != "CONSUMER"
    kinds = _CALLING if calls_only else (*_CALLING, "CONSUMER")
    candidates = mask & rows.are_of_kind(kinds)
    mask[:] = False
    if not candidates.any() or not rows.may_have("attributes", ATTRIBUTE_COLUMNS):
        return
    # Whatever attribute names the peer, it has the name of the host in it.
    match = _PLACE.fullmatch(peer)
    attributes = rows.map("attributes")
    entries = _entries(attributes, _contains(attributes.items, match["host"] if match else peer))
    has_text = np.zeros(len(mask), np.bool_)
    has_text[_rows_at(attributes, entries)] = True
    places = np.flatnonzero(candidates & has_text)
    if len(places):
        mask[places] = meaning.calls_to(rows.calls(places), peer)


def _has_pair(maps: pa.Array, key: str, text: str) -> Mask:
    """Which maps have an entry."""
    mask = np.zeros(len(maps), np.bool_)
    # Fewer entries have the value than the key: the others' keys need no look.
    entries = _entries(maps, is_in(_chunked(maps.items), pa.array([text])))
    if len(entries):
        keys = _chunked(maps.keys.take(pa.array(entries)))
        mask[_rows_at(maps, entries[is_in(keys, pa.array([key]))])] = True
    return mask


def _has_text(maps: pa.Array, key: str) -> Mask:
    """Which maps have a key, with a text that is not blank."""
    mask = np.zeros(len(maps), np.bool_)
    entries = _entries(maps, is_in(_chunked(maps.keys), pa.array([key])))
    texts = maps.items.take(pa.array(entries)).to_pylist()
    is_filled = np.fromiter((bool(text and text.strip()) for text in texts), np.bool_, len(texts))
    mask[_rows_at(maps, entries[is_filled])] = True
    return mask


def _entries(maps: pa.Array, mask: Mask) -> npt.NDArray[np.int64]:
    """The places of those entries that are in a map: others may be beside those of a slice."""
    first, last = maps.offsets[0].as_py(), maps.offsets[-1].as_py()
    places: npt.NDArray[np.int64] = np.flatnonzero(mask[first:last]) + first
    return places


def _rows_at(maps: pa.Array, entries: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The map that has each of some entries."""
    rows: npt.NDArray[np.int64] = np.searchsorted(maps.offsets.to_numpy(), entries, side="right")
    return rows - 1


def _chunked(array: pa.Array) -> pa.ChunkedArray:
    return pa.chunked_array([array])


def _contains(texts: pa.Array, part: str) -> Mask:
    """Which texts have a part; of a dictionary, each is looked at once."""
    if not pa.types.is_dictionary(texts.type):
        texts = texts.dictionary_encode()
    has = pc.match_substring(texts.dictionary, part).to_numpy(zero_copy_only=False)
    mask: Mask = np.append(has, False)[texts.indices.fill_null(-1).to_numpy()]
    return mask


def is_in(column: pa.ChunkedArray, texts: pa.Array) -> Mask:
    """Which rows have one of some texts; of a dictionary, each text is compared once."""
    parts = [np.zeros(0, np.bool_)]
    for chunk in column.chunks:
        if pa.types.is_dictionary(chunk.type):
            is_text = pc.is_in(chunk.dictionary, texts).to_numpy(zero_copy_only=False)
            if not is_text.any():
                parts.append(np.zeros(len(chunk), np.bool_))
                continue
            codes = chunk.indices.fill_null(-1).to_numpy()
            parts.append(np.append(is_text, False)[codes])
        else:
            parts.append(pc.is_in(chunk, texts).to_numpy(zero_copy_only=False))
    mask: Mask = np.concatenate(parts)
    return mask


def one(column: pa.ChunkedArray) -> pa.Array:
    """A column in one piece."""
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)
