"""Parameters of a question: read once, checked, and no others than are known."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from starlette.datastructures import QueryParams

from batchmill.web.errors import BadQuestion

LONGEST = 4_096
"""Characters of one parameter."""


def read_params(given: QueryParams, known: Collection[str]) -> dict[str, str]:
    """The parameters by name; one that is empty counts as not given."""
    found: dict[str, str] = {}
    for name, value in given.multi_items():
        if name not in known:
            allowed = ", ".join(known) or "none"
            raise BadQuestion(f"{name[:64]!r} is no parameter here: there are {allowed}")
        if name in found:
            raise BadQuestion(f"{name} is given twice")
        if len(value) > LONGEST:
            raise BadQuestion(f"{name} has more than {LONGEST:,} characters")
        found[name] = checked(name, value)
    return {name: value for name, value in found.items() if value}


def checked(name: str, text: str) -> str:
    """A text that a database can be asked for."""
    if "\0" in text:
        raise BadQuestion(f"{name} holds a NUL character")
    return text


def whole(params: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    """A parameter that is a whole number."""
    text = params.get(name)
    if text is None:
        return default
    if text.isascii() and text.isdigit() and len(text) < 19 and least <= int(text) <= most:
        return int(text)
    raise BadQuestion(
        f"{name}={text[:64]!r} is not valid: it must be a whole number from {least:,} to {most:,}"
    )


def choice(params: Mapping[str, str], name: str, default: str, allowed: Collection[str]) -> str:
    """A parameter that is one of a few words."""
    text = params.get(name, default)
    if text not in allowed:
        raise BadQuestion(f"{name}={text[:64]!r} is not valid: it must be {', '.join(allowed)}")
    return text
