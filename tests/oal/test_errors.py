"""Wrong scripts: each fault with its place, its text and what would be right; all of them."""

from __future__ import annotations

import copy
import pickle
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchmill import BatchmillError, oal
from batchmill.oal import OalError, OalErrors


def errors_of(text: str) -> tuple[OalError, ...]:
    """What is wrong with a script."""
    with pytest.raises(OalErrors) as caught:
        oal.parse(text, file="f.oal")
    return caught.value.errors


WRONG = [
    # names
    ("from(Servce.*).cpm()", "Servce", "did you mean Service"),
    ("from(Service.latncy).sum()", "latncy", "did you mean latency"),
    ("from(Service.*).filter(statsu == true).cpm()", "statsu", "did you mean status"),
    ("from(K8SService.write.l5.duration).sum()", "l5", "there are duration, l2, l3, l4"),
    ("from(Service.*).cmp()", "cmp", "did you mean cpm"),
    ("from(Service.*).nothing()", "nothing", "labelAvg"),
    ("from(Service.*).filter(type == RequestType.HTP).cpm()", "HTP", "did you mean HTTP"),
    ("from(Service.*).filter(type == Reqest.HTTP).cpm()", "Reqest", "there is no enum"),
    ("from(Service.*).filter(type == DetectPoint.SERVER).cpm()", "DetectPoint", "RequestType.NAME"),
    ("from(Service.latency.x).sum()", "x", "has no fields"),
    ('from(Service.name["x"]).count()', '["x"]', "only a map has keys"),
    # comparisons
    ("from(Service.*).filter(name == 5).cpm()", "5", "a string in double quotes"),
    ("from(Service.*).filter(name > 5).cpm()", ">", "needs a number"),
    ("from(Service.*).filter(latency == true).cpm()", "true", "expected a whole number"),
    ('from(Service.*).filter(latency == "5").cpm()', '"5"', "expected a whole number"),
    ('from(Service.*).filter(latency like "5%").cpm()', "like", "needs a string"),
    ('from(Service.*).filter(status == "true").cpm()', '"true"', "true or false"),
    ("from(Service.*).filter(status == Layer.MESH).cpm()", "Layer.MESH", "true or false"),
    ('from(Service.*).filter(type == "HTTP").cpm()', '"HTTP"', "RequestType.HTTP"),
    ("from(Service.*).filter(layer == 5).cpm()", "5", "Layer.GENERAL"),
    ("from(Service.*).filter(layer == RequestType.HTTP).cpm()", "RequestType.HTTP", "Layer.NAME"),
    ('from(Service.*).filter(name contain "x").cpm()', "contain", "a list of strings"),
    ('from(Service.*).filter(tags == "x").cpm()', "==", "contain"),
    ('from(Service.*).filter(tag == "x").cpm()', "==", '["key"]'),
    ("from(Service.*).filter(latency in [true]).cpm()", "true", "expected a whole number"),
    ('from(Service.*).filter(latency in [1, "a"]).cpm()', '"a"', "one kind"),
    ("from(Service.*).filter(latency in []).cpm()", "]", "expected"),
    ("from(Service.*).filter(name in [null]).cpm()", "null", "== null"),
    ("from(Service.*).filter(latency > null).cpm()", "null", "a whole number"),
    ("from(Service.*).filter(latency == name).cpm()", "name", "a whole number"),
    # casts
    ("from((str->double)Service.name).sum()", "str->double", "(str->long)"),
    ("from((str->long)Service.latency).sum()", "(str->long)", "drop the cast"),
    ("from((long)EnvoyInstanceMetric.value).sum()", "(long)", "is a double"),
    ("from((long)Service.*).sum()", "*", "no cast"),
    # functions
    ("from(Service.*).longAvg()", "*", "one of latency"),
    ("from(Service.name).longAvg()", "name", "(str->long)Service.name"),
    ("from(EnvoyInstanceMetric.value).longAvg()", "value", "use doubleAvg()"),
    ("from(EnvoyInstanceMetric.value).percentile2(10)", "value", "is a double"),
    ("from(Service.*).cpm(1)", "cpm(1)", "expected none"),
    ("from(Service.latency).percentile2()", "percentile2()", "percentile2(precision)"),
    ("from(Service.latency).percentile2(0)", "0", "from 1 up"),
    ("from(Service.latency).percentile2(name)", "name", "a whole number"),
    ("from(Service.latency).histogram(1, 999999999)", "999999999", "from 1 to 10000"),
    ("from(Service.*).percent(status)", "status", "status == true"),
    ("from(Service.*).percent(true)", "true", "a condition"),
    ("from(Service.*).rate(status == true)", "rate(status == true)", "denominator"),
    ("from(Service.latency).apdex(status, status)", "status", "a string"),
    ("from(Service.latency).apdex(name, name)", "name", "true or false"),
    ("from(Service.*).labelCount(tag)", "tag", "is a map"),
    ("from(Service.*).labelAvg(name, name)", "name", "a whole number"),
    ("from(Service.*).labelCount(name, 5, 5)", "labelCount(name, 5, 5)", "[cap]"),
    ('from(Service.*).cpm().decorator(" ")', '" "', "blank"),
    ("from(Service.*).cpm().decorator(x)", "x", "double quotes"),
    # syntax
    ("from(Service).cpm()", ")", "expected ."),
    ("from(Service.*)", "", "the script ends"),
    ("from(Service.*).filter(status = true).cpm()", "=", "one = is for"),
    ("from(Service.*).filter(status).cpm()", ")", "a comparison"),
    ("form(Service.*).cpm()", "form", "expected from"),
    ("from(Service.*).cpm() x", "x", "expected ;"),
    ("from(Service.*).cpm(", "", "the script ends"),
    # characters
    ("from(Service.*).filter(name == 'a').cpm()", "'", "double quotes"),
    ('from(Service.*).filter(name == "a).cpm()', '"a).cpm()', "does not end"),
    (r'from(Service.*).filter(name == "\q").cpm()', r"\q", "unknown escape"),
    ("from(Service.*).filter(latency > -5).cpm()", "-", "no sign"),
    ("from(Service.*).filter(latency > 1.5).cpm()", "1.5", "whole"),
    ("from(Service.*).filter(latency > 5ms).cpm()", "5ms", "no number"),
    (f"from(Service.*).filter(latency > {2**63}).cpm()", str(2**63), "too big"),
    ("from(Service.*).filter(latency > 1 && status == true).cpm()", "&&", "chain"),
    ("from(Service.*).cpm() /* and", "/*", "*/"),
    ("from(Sérvice.*).cpm()", "é", "means nothing"),
    ("from(Service.*).cpm()\x00", "\x00", "means nothing"),
]


@pytest.mark.parametrize(("statement", "text", "said"), WRONG, ids=[row[0][:60] for row in WRONG])
def test_a_fault_is_named_at_its_place(statement: str, text: str, said: str) -> None:
    """One fault, one error: file, line, column, the offending text, and what would be right."""
    script = f"a = from(Service.*).cpm();\n  b = {statement}"
    (error,) = errors_of(script)
    assert error.text == text
    assert said in error.message
    line = script.split("\n")[1]
    assert (error.file, error.line) == ("f.oal", 2)
    assert line[error.column - 1 :].startswith(text)
    assert str(error).startswith(f"f.oal:2:{error.column}: ")
    assert error.source_line == line


def test_the_fault_is_underlined() -> None:
    """The line, and a caret under each character that is meant."""
    (error,) = errors_of("m = from(Servce.*).cpm();")
    assert str(error).split("\n")[1:] == [
        "    m = from(Servce.*).cpm();",
        "             ^^^^^^",
    ]


def test_every_fault_of_a_script_is_listed_in_order() -> None:
    """Also several in one statement, and those behind a statement that cannot be read."""
    errors = errors_of(
        "a = from(Servce.*).cpm();\n"
        "b = from(Service.latncy).filter(statsu == true).filter(name == 5).longAg();\n"
        "c = from(;\n"
        "d = from(Service.*).cpm()\n"  # the semicolon is missing: the next line is found anyway
        "e = from(Service.*).nope();\n"
        "disable(5);\n"
        "a = from(Service.*).cpm();\n"
    )
    assert [(result.line, result.column) for result in errors] == [
        (1, 10),
        *((2, column) for column in (18, 33, 64, 67)),
        (3, 10),
        (5, 1),
        (5, 21),
        (6, 9),
        (7, 1),
    ]
    assert errors[-1].message == "the metric 'a' is defined already, at f.oal:1:1"


def test_lines_end_as_they_end_anywhere() -> None:
    """Unix, Windows and old Mac line ends all count as one."""
    assert [error.line for error in errors_of("x\n=;\r\ny\r=;")] == [2, 4]


def test_a_long_line_is_shown_around_the_fault() -> None:
    """A script on one line does not flood the terminal."""
    good = [f"m{number} = from(Service.*).cpm(); " for number in range(1000)]
    (error,) = errors_of("".join([*good[:500], "bad = from(Servce.*).cpm();", *good[500:]]))
    shown, caret = str(error).split("\n")[1:]
    assert len(shown) <= 104
    assert shown[caret.index("^") :].startswith("Servce")


def test_errors_of_several_files_come_together(tmp_path: Path) -> None:
    """Sorted by file; a name defined in two files is named with both places."""
    (tmp_path / "a.oal").write_text("x = from(Service.*).cpm(); y = from(Servce.*).cpm();")
    (tmp_path / "b.oal").write_text("x = from(Service.*).cpm();")
    with pytest.raises(OalErrors) as caught:
        oal.load([tmp_path / "b.oal", tmp_path / "a.oal", tmp_path / "none.oal"])
    places = [
        f"{Path(error.file).name}:{error.line}:{error.column}" for error in caught.value.errors
    ]
    assert places == ["a.oal:1:1", "a.oal:1:37", "none.oal:1:1"]
    assert "b.oal:1:1" in caught.value.errors[0].message
    assert "3 errors in 2 scripts" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "line", "column", "said"),
    [
        (b"// fine\n// caf\xe9\n", 2, 7, "0xe9"),
        (b"\xff\xfe\x00", 1, 1, "not UTF-8"),
        ("// ü\n// ü".encode() + b"\xfc", 2, 5, "0xfc"),
    ],
)
def test_a_file_that_is_no_text(
    tmp_path: Path, content: bytes, line: int, column: int, said: str
) -> None:
    """The first byte that cannot be is named with its place."""
    file = tmp_path / "x.oal"
    file.write_bytes(content)
    with pytest.raises(OalErrors, match=said) as caught:
        oal.load(file)
    (error,) = caught.value.errors
    assert (error.line, error.column) == (line, column)


def test_an_empty_folder_is_no_script(tmp_path: Path) -> None:
    """Most likely it is the wrong folder."""
    with pytest.raises(OalErrors, match=r"holds no \*.oal"):
        oal.load(tmp_path)


def faults(text: str) -> tuple[OalError, ...]:
    """What is wrong with a script; nothing may be."""
    try:
        oal.parse(text)
    except OalErrors as caught:
        return caught.errors
    return ()


@given(st.text(max_size=200) | st.text('ab =from().*;"/[],5->!\n', max_size=200))
def test_any_text_is_read_or_answered(text: str) -> None:
    """Whatever is thrown at it: a script, or errors whose places are in the text."""
    for fault in faults(text):
        assert fault.column <= len(fault.source_line) + 1
        assert str(fault)


@pytest.mark.parametrize("name", ["5", "5xx_count", '"x"', ".", "=", "(", "->", "é", "'x'"])
@pytest.mark.parametrize("before", ["", 'a = from(Service.*).cpm().decorator("d") '])
def test_a_name_that_is_none_is_one_fault(name: str, before: str) -> None:
    """What stands where a name should is answered at its place, and reading goes on behind it."""
    script = f"{before}{name} = from(Service.*).count();\nb = from(Servce.*).cpm();"
    first, last = errors_of(script)
    assert (first.line, first.column) == (1, len(before) + 1)
    assert (last.line, last.text) == (2, "Servce")


WORDS = [
    *("a", "from", "disable", "filter", "Service", "latency", "cpm", "not", "contain", "in"),
    *("=", "= from", "= from(Service.*).cpm()", ";", ".", ",", "*", "(", ")", "[", "]", "->", "=="),
    *("5", "5xx", "1.5", '"x"', '"', "'", "é", "&&", "// x\n", "/*", "\n", "\ufeff", "\x00"),
]


@given(st.lists(st.sampled_from(WORDS), max_size=30))
def test_any_words_in_any_order_are_answered(words: list[str]) -> None:
    """Reading ends, and whatever is wrong has a line and a column at which its text stands."""
    text = " ".join(words)
    lines = text.split("\n")
    for fault in faults(text):
        assert lines[fault.line - 1][fault.column - 1 :].startswith(fault.text.split("\n")[0])
        assert str(fault).startswith(f"<string>:{fault.line}:{fault.column}: ")


@given(st.data())
def test_a_damaged_script_is_answered(data: st.DataObject) -> None:
    """A core script with a piece cut out or put in twice: metrics, or a handful of errors."""
    text = oal.core_script().read_text("utf-8")[600:2600]
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 30)))
    damaged = text[:start] + data.draw(st.sampled_from(["", text[start:end] * 2])) + text[end:]
    assert len(faults(damaged)) < 20


NOISE = random.Random(7)


@pytest.mark.parametrize(
    ("text", "most"),
    [
        ("".join(chr(NOISE.randrange(1, 300)) for _ in range(120_000)), 10_000),
        ('"\n' * 10_000, 10_000),
        ('"' + "\\n" * 120_000, 1),
        ("/*" * 120_000, 1),
        ("m = from(a.b" + "[" * 120_000, 1),
        ("m = from(Service" + ".a" * 120_000 + ").sum()", 1),
        ("m = from(" * 5_000, 5_000),
        ("1" * 120_000, 2),
        ("(" * 120_000, 1),
    ],
    ids=["noise", "quotes", "string", "comments", "brackets", "path", "from", "digits", "nesting"],
)
def test_much_junk_is_answered_soon(text: str, most: int) -> None:
    """Reading takes time in proportion to the text: were it the square, this would not end."""
    assert 0 < len(faults(text)) <= most


@pytest.mark.parametrize(
    "travel", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy]
)
def test_errors_travel(travel: object) -> None:
    """Pickled or copied, they say and carry the same."""
    assert callable(travel)
    with pytest.raises(OalErrors) as caught:
        oal.parse("a = from(Servce.*).cpm(); b = ")
    back = travel(caught.value)
    assert str(back) == str(caught.value)
    assert [vars(error) for error in back.errors] == [vars(error) for error in caught.value.errors]
    assert isinstance(back, BatchmillError)
    assert isinstance(back, ValueError)


# batchmill oal check
