"""Finding what somebody named, and saying what there is instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from batchmill.store import Named, Snapshot
from batchmill.web.errors import NotFound

_MOST = 5
_LOOKED_AT = 5_000


def found_one(snapshot: Snapshot, kind: str, given: str) -> Named:
    """The entity with that id, else the one with that name; 404 with the nearest names if none."""
    found = snapshot.find(kind, id_or_name=given)
    if not found:
        known = snapshot.find(kind, most=_LOOKED_AT)
        raise NotFound(_nothing(f"there is no {kind} {given[:200]!r}", given, known))
    return next((each for each in found if each.id == given), found[0])


def _nothing(what: str, given: str, known: Iterable[Named]) -> str:
    names = list(dict.fromkeys(each.name for each in known))
    if not names:
        return f"{what}: the store has none yet"
    low = {each.casefold(): each for each in names}
    near = difflib.get_close_matches(given.casefold()[:200], low, _MOST, 0.5)
    if near:
        return f"{what}: did you mean {', '.join(repr(low[each]) for each in near)}?"
    return f"{what}: there are {', '.join(map(repr, names[:_MOST]))}, and maybe others"
