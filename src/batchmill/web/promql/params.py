"""Parameters of the Prometheus API, of an address or a form; moments and steps as it has them."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from urllib.parse import parse_qsl

from starlette.requests import Request

from batchmill.web.errors import BadQuestion

MOST_STEPS = 11_000
MOST_BODY = 2**20
MOST_SERIES = 20_000
_LAST_S = 253_402_300_799
_SECONDS = re.compile(r"-?[0-9]{1,12}(?:\.[0-9]{1,9})?", re.ASCII)
_STEP = re.compile(r"[0-9]{1,12}(?:\.[0-9]{1,9})?(?:[eE][+-]?[0-9]{1,2})?", re.ASCII)
_DURATION = re.compile(
    r"(?:([0-9]{1,9})y)?(?:([0-9]{1,9})w)?(?:([0-9]{1,9})d)?(?:([0-9]{1,9})h)?"
    r"(?:([0-9]{1,9})m)?(?:([0-9]{1,9})s)?(?:([0-9]{1,9})ms)?",
    re.ASCII,
)
_UNITS_S = (31_536_000, 604_800, 86_400, 3600, 60, 1, 0.001)

Params = dict[str, list[str]]


async def read_params(request: Request) -> Params:
    """Those of the address and, of a POST, of the form in its body."""
    pairs = list(request.query_params.multi_items())
    if request.method == "POST":
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind not in ("application/x-www-form-urlencoded", ""):
            raise BadQuestion("a POST brings its parameters as application/x-www-form-urlencoded")
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MOST_BODY:
                raise BadQuestion(f"the body has more than {MOST_BODY:,} bytes")
        try:
            pairs += parse_qsl(
                body.decode("utf-8"), keep_blank_values=True, max_num_fields=1_000, errors="strict"
            )
        except ValueError:
            raise BadQuestion("the body is no form") from None
    found: Params = {}
    for name, value in pairs:
        if "\0" in value:
            raise BadQuestion("a parameter holds a NUL character")
        found.setdefault(name, []).append(value)
    return found


def one(params: Params, name: str) -> str:
    """A parameter that must be there."""
    given = params.get(name, [""])[0]
    if not given.strip():
        raise BadQuestion(f'invalid parameter "{name}": it is missing')
    return given


def moment(params: Params, name: str, default: float) -> float:
    """A moment in seconds since 1970, to the millisecond."""
    text = params.get(name, [""])[0]
    if not text:
        return round(default, 3)
    found: float | None = None
    if _SECONDS.fullmatch(text):
        found = float(text)
    elif text[:4].isdigit() and len(text) < 64:
        try:
            read = datetime.fromisoformat(text)
            found = read.replace(tzinfo=read.tzinfo or UTC).timestamp()
        except (ValueError, OverflowError):
            found = None
    if found is None or not 0 <= found <= _LAST_S:
        raise BadQuestion(
            f'invalid parameter "{name}": cannot parse {text[:64]!r} to a valid timestamp'
        )
    return round(found, 3)


def moments(params: Params) -> list[float]:
    """Every moment of a range, step by step."""
    for name in ("start", "end", "step"):
        one(params, name)
    start_s, end_s = moment(params, "start", 0), moment(params, "end", 0)
    step_s = _step(params["step"][0])
    if end_s < start_s:
        raise BadQuestion('invalid parameter "end": end timestamp must not be before start time')
    if step_s <= 0:
        raise BadQuestion(
            'invalid parameter "step": zero or negative query resolution step widths are not '
            "accepted. Try a positive integer"
        )
    if (end_s - start_s) / step_s > MOST_STEPS:
        raise BadQuestion(
            f"exceeded maximum resolution of {MOST_STEPS:,} points per timeseries. Try decreasing "
            "the query resolution (?step=XX)"
        )
    start_ms, step_ms = round(start_s * 1000), max(1, round(step_s * 1000))
    return [each / 1000 for each in range(start_ms, round(end_s * 1000) + 1, step_ms)]


def _step(text: str) -> float:
    if _STEP.fullmatch(text):
        return float(text)
    found = _DURATION.fullmatch(text)
    if not found or not text:
        raise BadQuestion(
            f'invalid parameter "step": cannot parse {text[:64]!r} to a valid duration'
        )
    return sum(int(each) * unit for each, unit in zip(found.groups(0), _UNITS_S, strict=True))


def limit(params: Params) -> int:
    """How many are wanted at most; 0: as many as there may be."""
    text = params.get("limit", [""])[0]
    if not text or text == "0":
        return MOST_SERIES
    if not (text.isascii() and text.isdigit() and len(text) < 12):
        raise BadQuestion('invalid parameter "limit": it must be a whole number')
    return min(int(text), MOST_SERIES)
