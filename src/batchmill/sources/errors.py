"""Errors of the catalog: unknown names, and texts that are not entity ids."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from batchmill.errors import BatchmillError

MOST_NAMES = 12
"""A message lists no more names than this."""


class UnknownNameError(BatchmillError, LookupError):
    """No source, field, enum or the like has this name."""

    what: str
    """What was looked for, such as ``field of Endpoint``."""
    name: str
    known: tuple[str, ...]
    """The names that exist."""

    def __str__(self) -> str:
        return f"no {self.what} is called {self.name!r}: {suggest(self.name, self.known)}"


class EntityIdError(BatchmillError, ValueError):
    """A text is not an entity id of that kind."""

    kind: str
    id: str
    template = (
        "{id!r} is not an entity id of kind {kind!r}: "
        "pass the id as the store holds it, and the kind of its source's entity"
    )


def suggest(name: str, known: Sequence[str]) -> str:
    """Suggest names for an unknown one: close matches first, then the others, up to a dozen."""
    if not known:
        return "there are none"
    folded = {word.lower(): word for word in known}
    close = [folded[word] for word in difflib.get_close_matches(name.lower()[:80], folded)]
    rest = [word for word in sorted(known) if word not in close]
    room = max(0, MOST_NAMES - len(close))
    shown = ", ".join(rest[:room])
    more = f", and {len(rest) - room} more" if len(rest) > room else ""
    if not close:
        return f"there are {shown}{more}" if len(known) > 1 else f"there is {shown}"
    hint = f"did you mean {' or '.join(close)}?"
    return f"{hint} There are also {shown}{more}" if shown else hint
