"""Regular expressions of label matchers: RE2's syntax, whole texts, linear time."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchmill.web.promql.parser import Regex
from batchmill.web.responses import BadRequest

ATOMS = st.sampled_from(
    ["a", "b", "ab", ".", "[ab]", "[^a]", "[a-c]", r"\.", r"\d", r"\w", r"[\d-]", "a-b", r"\x61"]
)
REPEATS = st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{0,2}", "{2,}", "{0}", "*?"])


def _grown(inside: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.tuples(inside, inside).map("".join),
        st.tuples(inside, inside).map("|".join),
        st.tuples(inside, inside).map(lambda pair: f"({pair[0]}|{pair[1]})"),
        st.tuples(inside, REPEATS).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
    )


@settings(max_examples=150)
@given(st.recursive(ATOMS, _grown, max_leaves=6), st.lists(st.text("abc.1-", max_size=6)))
def test_it_matches_what_python_matches(expression: str, texts: list[str]) -> None:
    """Of any expression, the whole texts that match are the same."""
    ours, theirs = Regex(expression), re.compile(expression, re.DOTALL)
    for text in texts:
        assert ours.matches(text) == bool(theirs.fullmatch(text)), text


@pytest.mark.parametrize(
    ("expression", "text", "matches"),
    [
        ("(?i)SHOP", "shop", True),
        ("(?i)[a-c]+", "ABC", True),
        ("^shop$", "shop", True),
        ("shop", "shops", False),
        ("", "", True),
        ("é+", "éé", True),
        (r"a\|b", "a|b", True),
        ("[]a]+", "]a", True),
        (r"GET /\{id\}", "GET /{id}", True),
        ("[[:alpha:]]+", "shop", True),
        ("(?P<name>a)", "a", True),
        ("a.b", "a\nb", True),
    ],
)
def test_what_prometheus_knows_beside(expression: str, text: str, matches: bool) -> None:
    """Anchors at the ends, no matter of case, escapes, other alphabets."""
    assert Regex(expression).matches(text) is matches


def test_nothing_runs_away() -> None:
    """Expressions that take others years are answered at once."""
    assert not Regex("(a|a)*b").matches("a" * 2000)
    assert not Regex("(a*)*b").matches("a" * 2000)
    assert Regex("(a?){25}a{25}").matches("a" * 25)


@pytest.mark.parametrize(
    "expression",
    [
        *("(", ")", "*a", "a**", "[a", "a\\", "x{3,2}", "[b-a]", r"\x{}", "(?<=a)b", r"(a)\1"),
        *("((a{1000}){1000}){1000}", "a" * 20_000, "\ud800"),
    ],
)
def test_what_is_not_valid_is_refused(expression: str) -> None:
    """With what is wrong, and without taking long."""
    with pytest.raises(BadRequest, match="a regular expression"):
        Regex(expression)
