"""Paths and conditions of the metric language, written as Spark SQL.

Text in, text out: nothing here touches Spark, so a whole source's plan is written once and reused
for every micro-batch. Every expression is native: no Python runs on the way of a row.
"""

from __future__ import annotations

from collections.abc import Mapping

from batchmill.oal import ApdexCount, Condition, MapKey, Path

DEFAULT_APDEX_MS = 500

_WHOLE_NUMBER = "^[+-]?[0-9]+$"


def literal(value: object) -> str:
    """A bool, whole number, string or None as SQL writes it."""
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


def path(each: Path) -> str:
    """The value that a path leads to; null wherever a step of it is."""
    first, *rest = each.parts
    assert isinstance(first, str)
    text = name("time_" if first == "time" else first)
    for part in rest:
        text += f"[{literal(part.key)}]" if isinstance(part, MapKey) else f".{name(part)}"
    if each.cast is None:
        return text
    kind = "BIGINT" if each.cast == "long" else "INT"
    # Spark would also read ' 12 ' and '1.5'.
    return f"IF(CAST({text} AS STRING) RLIKE '{_WHOLE_NUMBER}', TRY_CAST({text} AS {kind}), NULL)"


def condition(each: Condition) -> str:
    """True where it holds; false or null where it does not, which every use takes as one."""
    left = path(each.path)
    if each.literal is None:
        return f"{left} IS {'NOT ' if each.op == '!=' else ''}NULL"
    if each.op == "in":
        assert isinstance(each.literal, tuple)
        if not each.literal:
            return "false"
        return f"{left} IN ({', '.join(literal(one) for one in each.literal)})"
    if each.op == "like":
        return _like(left, str(each.literal))
    if each.op in ("contain", "not contain"):
        # array_contains answers null, not false, where the list holds a null.
        found = f"COALESCE(ARRAY_CONTAINS({left}, {literal(each.literal)}), false)"
        return found if each.op == "contain" else f"{left} IS NOT NULL AND NOT {found}"
    symbol = {"==": "=", "!=": "<>"}.get(each.op, each.op)
    return f"{left} {symbol} {literal(each.literal)}"


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
    """A double as four whole numbers whose sums are exact; see ``oal.DoubleSum``."""
    # Toward zero: the difference to the whole part is then exact, for a tiny negative number too.
    made, rest = [f"CAST({value} AS BIGINT)"], value
    for _ in range(3):
        rest = f"(({rest} - CAST(CAST({rest} AS BIGINT) AS DOUBLE)) * 1073741824.0D)"
        made.append(f"CAST({rest} AS BIGINT)")
    return tuple(made)


def apdex(state: ApdexCount, thresholds: Mapping[str, int]) -> str:
    """Whether a row is satisfied, or tolerated."""
    limit = literal(DEFAULT_APDEX_MS)
    if thresholds:
        known = ", ".join(f"{literal(key)}, {literal(ms)}" for key, ms in thresholds.items())
        limit = f"COALESCE(MAP({known})[{path(state.name)}], {limit})"
    value = path(state.value)
    if state.which == "satisfied":
        return f"{path(state.status)} AND {value} <= {limit}"
    return f"{path(state.status)} AND {value} > {limit} AND {value} <= 4 * {limit}"
