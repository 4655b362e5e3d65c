"""Regular expressions of label matchers, on RE2: Prometheus' own engine and syntax."""

from __future__ import annotations

from functools import cache

import re2

from batchmill.web.errors import BadQuestion

LONGEST = 16_384
"""Characters of an expression: Grafana joins all chosen values by ``|``."""


class Regex:
    """Matches whole texts in linear time; :class:`BadQuestion` if the expression is not valid."""

    def __init__(self, text: str) -> None:
        if len(text) > LONGEST:
            raise BadQuestion(f"a regular expression has more than {LONGEST:,} characters")
        try:
            self._compiled = re2.compile(text, _options())
        except re2.error as error:
            reason = error.args[0].decode("utf-8", "replace")
            raise BadQuestion(f"a regular expression is not valid for RE2: {reason}") from None
        except UnicodeEncodeError:
            raise BadQuestion("a regular expression is not valid Unicode text") from None

    def matches(self, text: str) -> bool:
        """Whether the whole text matches."""
        return self._compiled.fullmatch(text) is not None


@cache
def _options() -> re2.Options:
    options = re2.Options()
    options.dot_nl = True  # as Prometheus: `.` matches a newline, too
    options.log_errors = False
    return options
