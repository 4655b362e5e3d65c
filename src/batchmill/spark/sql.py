"""Translates literals, names, paths and conditions of the metric language to Spark SQL text.

Nothing here needs a session, so the SQL of a source is written once and used for every micro-batch.
All expressions are Spark's own: no Python runs for a row.
"""

from __future__ import annotations

from collections.abc import Mapping

from batchmill.aggregate import DEFAULT_APDEX_MS, MOST_MS
from batchmill.oal import LOG_BITS, ApdexCount, Condition, MapKey, Path

# Of a text with a line break at its end, $ would match before that.
_WHOLE_NUMBER = r"^[+-]?[0-9]+\\z"


def literal(value: object) -> str:
    """A bool, whole number, string or None as a SQL literal."""
    if value is None:
        return "NULL"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        # The plain digits of the least long are read as a negated number that is too large.
        return f"{value}L" if -(2**63) < value < 2**63 else f"CAST('{value}' AS DECIMAL(38,0))"
    text = str(value).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{text}'"


def name(column: str) -> str:
    """A column's name, quoted."""
    return "`" + column.replace("`", "``") + "`"


def path(steps: Path) -> str:
    """The value at a path; null if any step of it is null."""
    first, *rest = steps.parts
    assert isinstance(first, str)
    text = name("time_" if first == "time" else first)
    for part in rest:
        text += f"[{literal(part.key)}]" if isinstance(part, MapKey) else f".{name(part)}"
    if steps.cast is None:
        return text
    return read_whole(f"CAST({text} AS STRING)", "BIGINT" if steps.cast == "long" else "INT")


def micros(ms: str) -> str:
    """Milliseconds as microseconds."""
    return f"LEAST(GREATEST(CAST({ms} AS BIGINT), {-MOST_MS}L), {MOST_MS}L) * 1000L"


def log_bucket(value: str) -> str:
    """The bucket of a whole number, as :func:`batchmill.oal.values.log_bucket` has it."""
    positive = f"IF({value} < 0, 0L, CAST({value} AS BIGINT))"
    shift = f"GREATEST(LENGTH(BIN({positive})) - {LOG_BITS + 1}, 0)"
    return f"CAST(SHIFTLEFT({shift}, {LOG_BITS}) + SHIFTRIGHT({positive}, {shift}) AS INT)"


def read_whole(text: str, kind: str) -> str:
    """A text as a whole number; null if it is not one, or too large."""
    # Spark would also read ' 12 ' and '1.5'.
    return f"IF({text} RLIKE '{_WHOLE_NUMBER}', TRY_CAST({text} AS {kind}), NULL)"


def condition(term: Condition) -> str:
    """A condition: true if it holds, otherwise false or null, which no use tells apart."""
    left = path(term.path)
    if term.literal is None:
        return f"{left} IS {'NOT ' if term.op == '!=' else ''}NULL"
    if term.op == "in":
        assert isinstance(term.literal, tuple)
        if not term.literal:
            return "false"
        return f"{left} IN ({', '.join(literal(value) for value in term.literal)})"
    if term.op == "like":
        return _like(left, str(term.literal))
    if term.op in ("contain", "not contain"):
        # array_contains answers null, not false, where the list holds a null.
        contains = f"COALESCE(ARRAY_CONTAINS({left}, {literal(term.literal)}), false)"
        return contains if term.op == "contain" else f"{left} IS NOT NULL AND NOT {contains}"
    symbol = {"==": "=", "!=": "<>"}.get(term.op, term.op)
    return f"{left} {symbol} {literal(term.literal)}"


def _like(left: str, pattern: str) -> str:
    head, tail = pattern.startswith("%"), pattern.endswith("%")
    if pattern in ("%", "%%"):
        return f"{left} IS NOT NULL"
    text = literal(pattern[1 if head else 0 : -1 if tail else None])
    if head and tail:
        return f"CONTAINS({left}, {text})"
    if head:
        return f"ENDSWITH({left}, {text})"
    return f"STARTSWITH({left}, {text})" if tail else "false"


def limbs(value: str) -> tuple[str, ...]:
    """Split a double into four whole numbers whose sums are exact; see ``oal.DoubleSum``."""
    # Rounded toward zero, so that the remainder is exact, for a tiny negative number too.
    parts, rest = [f"CAST({value} AS BIGINT)"], value
    for _ in range(3):
        rest = f"(({rest} - CAST(CAST({rest} AS BIGINT) AS DOUBLE)) * 1073741824.0D)"
        parts.append(f"CAST({rest} AS BIGINT)")
    return tuple(parts)


def apdex(state: ApdexCount, thresholds: Mapping[str, int]) -> str:
    """Whether a row counts as satisfied or as tolerated, whichever the state counts."""
    limit = literal(DEFAULT_APDEX_MS)
    if thresholds:
        known = ", ".join(f"{literal(key)}, {literal(ms)}" for key, ms in thresholds.items())
        limit = f"COALESCE(MAP({known})[{path(state.name)}], {limit})"
    value = path(state.value)
    if state.which == "satisfied":
        return f"{path(state.status)} AND {value} <= {limit}"
    return f"{path(state.status)} AND {value} > {limit} AND {value} <= 4 * {limit}"
