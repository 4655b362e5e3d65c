"""Replaces ids in names of spans that look like URLs.

A name with an id in it, such as ``GET /orders/4711``, makes an endpoint of every order. Where the
instrumentation knows the route, the span has ``http.route``, and its name is left as it is.
"""

from __future__ import annotations

import re

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchmill.spans.texts import Mask, Texts

ID = "{id}"
"""Stands for an id."""
LONGEST_SEGMENT = 64
"""A longer segment of a path with a digit in it is an id."""

_URL = re.compile(
    r"(?P<head>(?:[A-Z]+ ){0,2}(?:https?://[^/?#\s]*)?)"
    r"(?P<path>/[^?#\s]*)(?:[?#]\S*)?(?P<rest>.*)",
    re.DOTALL,
)
_HEAD = re.compile(r"(?:[A-Z]+ ){0,2}(?:https?://[^/?#\s]*)?/[^?#\s]*")
"""The part of a URL before its query and what follows."""
_MAY_CHANGE = r"^(?:[A-Z]+ ){0,2}(?:https?://[^/?#\s]*)?/[^\s]*[0-9?#@]"
"""The same roughly, for Arrow: no other name can change."""
_NUMBERS = re.compile(r"[0-9]+(?:[-._:,;~+][0-9]+)*")
_ID = re.compile(
    r"(?<![0-9A-Za-z])(?:"
    r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"  # a UUID
    r"|(?=[0-9a-fA-F]*[0-9])[0-9a-fA-F]{8,}"  # a hash, in hex
    r"|(?=[0-9A-Za-z]*[0-9])[0-9A-Za-z]{16,}"  # a ULID, a token
    r"|[0-9]{3,}"
    r")(?![0-9A-Za-z])"
    r"|[0-9]{4,}"
)


def normalise_name(name: str) -> str:
    """A name with ``{id}`` for each id in its path, and without query and fragment.

    A name that is no path or URL, maybe behind words in capitals, stays as it is.

    >>> normalise_name("GET /orders/4711/items?page=2")
    'GET /orders/{id}/items'
    >>> normalise_name("/v1/users/9f0c3e1a-54cb-4a6e-8c53-0f6ea4e9e7aa")
    '/v1/users/{id}'
    """
    url = _URL.fullmatch(name)
    if url is None:
        return name
    path = "/".join(map(_segment, url["path"].split("/")))
    return f"{url['head']}{path}{url['rest']}"


def names_of_endpoint(names: pa.Array, endpoint: str) -> list[bool]:
    """Which names have ids that :func:`normalise_name` replaces, and are then that endpoint."""
    # Before the first id, and before a query, nothing changes.
    begin = _HEAD.match(endpoint.partition(ID)[0])
    may = pc.and_(
        pc.starts_with(names, begin[0] if begin else endpoint),
        pc.match_substring_regex(names, _MAY_CHANGE),
    )
    return [
        is_possible and name != endpoint and normalise_name(name) == endpoint
        for name, is_possible in zip(names.to_pylist(), may.to_pylist(), strict=True)
    ]


def _segment(text: str) -> str:
    if "@" in text or _NUMBERS.fullmatch(text):
        return ID
    if not any(map(str.isdigit, text)):
        return text
    return ID if len(text) > LONGEST_SEGMENT else _ID.sub(ID, text)


def normalise_names(names: Texts, has_route: Mask) -> Texts:
    """The names of spans, normalised where a span has no route."""
    if names.is_empty:
        return names
    may_change = pc.match_substring_regex(names.values, _MAY_CHANGE)
    if not pc.any(may_change).as_py():
        return names
    changed = pa.array(
        [
            normalise_name(name) if may else name
            for name, may in zip(names.values.to_pylist(), may_change.to_pylist(), strict=True)
        ],
        pa.string(),
    )
    # Both names of each text, one behind the other: with a route, and without.
    codes = names.codes + np.where(has_route | ~names.present, 0, len(names.values))
    both = pa.concat_arrays([names.values, changed])
    return Texts.distinct(codes.astype(np.int32), both).used()
