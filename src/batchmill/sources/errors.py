"""The errors of the catalog: names that do not exist, ids that are none."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from batchmill.errors import BatchmillError

MOST_NAMES = 12
"""A message lists no more names than this."""


class UnknownNameError(BatchmillError, LookupError):
    """There is no such source, field, enum or struct; carries ``what``, ``name`` and ``known``."""

    def __init__(self, what: str, name: str, known: tuple[str, ...]) -> None:
        super().__init__(what, name, known)
        self.what = what
        self.name = name
        self.known = known

    def __str__(self) -> str:
        return f"no {self.what} is called {self.name!r}: {suggest(self.name, self.known)}"


class EntityIdError(BatchmillError, ValueError):
    """A text is not an entity id of that kind; carries ``kind`` and ``id``."""

    def __init__(self, kind: str, id: str) -> None:  # noqa: A002 - it is what callers call it
        super().__init__(kind, id)
        self.kind = kind
        self.id = id

    def __str__(self) -> str:
        return (
            f"{self.id!r} is no entity id of kind {self.kind!r}: "
            "pass the id as the store holds it, and the kind of its source's entity"
        )


def suggest(name: str, known: Sequence[str]) -> str:
    """What to write instead of ``name``: close matches first, then what exists, bounded."""
    if not known:
        return "there are none"
    folded = {each.lower(): each for each in known}
    close = [folded[each] for each in difflib.get_close_matches(name.lower()[:80], folded)]
    rest = [each for each in sorted(known) if each not in close]
    room = max(0, MOST_NAMES - len(close))
    shown = ", ".join(rest[:room])
    more = f", and {len(rest) - room} more" if len(rest) > room else ""
    if not close:
        return f"there are {shown}{more}" if len(known) > 1 else f"there is {shown}"
    hint = f"did you mean {' or '.join(close)}?"
    return f"{hint} There are also {shown}{more}" if shown else hint
