from __future__ import annotations

import pickle
import re
from pathlib import Path as File
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchmill import oal, sources
from batchmill.oal import Condition, Count, MapKey, Metric, OalErrors, Path
from batchmill.oal.lexer import Lexer, ScriptText
from batchmill.sources import FieldType

SERVICE = sources.catalog().source("Service")
STRINGS, LONGS = FieldType("string"), FieldType("long")


def one(text: str) -> Metric:
    """The only metric of a script."""
    (metric,) = oal.parse(text).metrics
    return metric


def path(text: str, source: str = "Service") -> Path:
    """A plain path of a source."""
    field = sources.catalog().source(source).field(text)
    return Path(tuple(text.split(".")), field.type, required=field.required)


def condition(text: str, source: str = "Service") -> Condition:
    """The condition that a text means."""
    return one(f"m = from({source}.*).filter({text}).count()").filters[0]


# The grammar


def test_a_definition_with_everything() -> None:
    """Name, source, value, filters, function, arguments, decorator, and where it stands."""
    metric = one(
        '\n  m = from(K8SService.write.l4.duration).filter(type == "write")'
        ".filter(detectPoint == DetectPoint.CLIENT).percentile2(10)"
        '.decorator("K8SServiceDecorator");'
    )
    assert metric.name == "m"
    assert metric.source == "K8SService"
    assert metric.value == path("write.l4.duration", "K8SService")
    assert metric.filters == (
        Condition(path("type", "K8SService"), "==", "write"),
        Condition(path("detectPoint", "K8SService"), "==", "CLIENT"),
    )
    assert (metric.function, metric.args) == ("percentile2", (10,))
    assert metric.decorator == "K8SServiceDecorator"
    assert str(metric.where) == "<string>:2:3"
    assert metric.labelled


def test_a_star_measures_the_row() -> None:
    """`*` is no path at all."""
    assert one("m = from(Service.*).cpm();").value is None


@pytest.mark.parametrize(
    ("cast", "to"),
    [("(str->long)", "long"), ("(long)", "long"), ("(str->int)", "int"), ("(int)", "int")],
)
def test_a_cast_reads_a_number_from_a_string(cast: str, to: Any) -> None:
    """In from, in filters and in arguments alike; both spellings mean the same."""
    expected = Path(("tag", MapKey("k")), FieldType(to), cast=to)
    assert one(f'm = from({cast}Service.tag["k"]).sum()').value == expected
    assert condition(f'{cast} tag["k"] > 5').path == expected
    assert one(f'm = from(Service.*).labelAvg(name, {cast}tag["k"])').args[1] == expected


@pytest.mark.parametrize(("cast", "field"), [("(long)", "latency"), ("(int)", "latency")])
def test_a_cast_to_what_it_is_changes_nothing(cast: str, field: str) -> None:
    """A whole number is a whole number already."""
    assert one(f"m = from({cast}Service.{field}).sum()").value == path(field)


@pytest.mark.parametrize(
    ("text", "op", "literal"),
    [
        ('name == "a"', "==", "a"),
        ('name != "a"', "!=", "a"),
        ("name == null", "==", None),
        ("tags != null", "!=", None),
        ("sideCar == null", "==", None),
        ("latency == 5", "==", 5),
        ("latency > 5", ">", 5),
        ("latency < 5", "<", 5),
        ("latency >= 5", ">=", 5),
        ("latency <= 9223372036854775807", "<=", 2**63 - 1),
        ("latency in [3, 1,2 , 1]", "in", (1, 2, 3)),
        ('name in ["b","a"]', "in", ("a", "b")),
        ("status == true", "==", True),
        ("status != false", "!=", False),
        ("type == RequestType.gRPC", "==", "gRPC"),
        ("type in [RequestType.RPC, RequestType.HTTP]", "in", ("HTTP", "RPC")),
        ("layer == Layer.MESH", "==", "MESH"),
        ('layer == "MESH"', "==", "MESH"),
        ('layer in ["MESH", "GENERAL"]', "in", ("GENERAL", "MESH")),
        ('name like "%a"', "like", "%a"),
        ('tags contain "k:v"', "contain", "k:v"),
        ('tags not contain "k:v"', "not contain", "k:v"),
        ('tags not /* and never */ contain "k:v"', "not contain", "k:v"),
        (r'name == "a \"b\" \\ \n \t // /* x"', "==", 'a "b" \\ \n \t // /* x'),
        ('tag["a.b"] == "c"', "==", "c"),
        ('sideCar.internalErrorCode == ""', "==", ""),
    ],
)
def test_comparisons(text: str, op: str, literal: object) -> None:
    """Every operator with every kind of literal; an enum's is the name of its value."""
    comparison = condition(text)
    assert (comparison.op, comparison.literal) == (op, literal)


def test_keywords_are_names_elsewhere() -> None:
    """A field may be called count, a metric from, filter or disable."""
    script = oal.parse(
        "from = from(BrowserAppTraffic.count).sum(); filter = from(Service.*).cpm();"
        "disable = from(ServiceInstanceJVMMemory.max).max(); disable(filter)"
    )
    assert [metric.name for metric in script.metrics] == ["from", "filter", "disable"]
    assert script.disabled == ("filter",)


def test_the_last_statement_needs_no_semicolon() -> None:
    """The end of the file ends it, and superfluous semicolons say nothing."""
    text = ";; a = from(Service.*).cpm();; b = from(Service.*).count()"
    assert [metric.name for metric in oal.parse(text).metrics] == ["a", "b"]


@pytest.mark.parametrize("text", ["", "  \n", "// nothing", "/* no */ // thing", "\ufeff"])
def test_an_empty_script_defines_nothing(text: str) -> None:
    """Comments and blanks are no statements; a byte order mark is a blank."""
    assert oal.parse(text).metrics == ()


STATEMENT = (
    'm = from((str->long)Service.tag["a"]).filter(name in ["x", "y"]).filter(latency >= 5)'
    '.filter(tags not contain "z").filter(type == RequestType.MQ).longAvg().decorator("D");'
    "disable(n);"
)
gaps = st.sampled_from([" ", "\n", "\r\n", "\t", "/**/", '/* ; " */', '// ; "\n', "/* * */ /***/"])


@given(st.data())
def test_comments_and_blanks_stand_anywhere(data: st.DataObject) -> None:
    """Between any two tokens, any of them, and the script means the same."""
    tokens = [token.text for token in Lexer(ScriptText("f", STATEMENT), []).tokens()]
    spread = "".join(data.draw(gaps) + token for token in tokens)
    assert oal.parse(spread) == oal.parse(STATEMENT)


# The canonical text


def test_the_order_of_filters_does_not_matter() -> None:
    """Same filters, repeated or not, in any order: same text, same states, equal metrics."""
    one_way = one('m = from(Service.*).filter(name == "a").filter(latency > 1).cpm()')
    other = one('m=from(Service.*).filter(latency>1).filter(name=="a").filter(latency > 1).cpm();')
    assert one_way.text == other.text
    assert one_way.states == other.states
    assert one_way == other


@pytest.mark.parametrize(
    "other",
    [
        "n = from(Service.*).filter(latency > 2).cpm()",
        "n = from(Service.*).filter(latency >= 1).cpm()",
        "n = from(Service.latency).filter(latency > 1).cpm()",
        "n = from(Endpoint.*).filter(latency > 1).cpm()",
        "n = from(Service.*).filter(latency > 1).count()",
        'n = from(Service.*).filter(latency > 1).cpm().decorator("ServiceDecorator")',
    ],
)
def test_another_definition_has_another_text(other: str) -> None:
    """What differs in meaning differs in text."""
    assert one(other).text != one("n = from(Service.*).filter(latency > 1).cpm()").text


def test_the_text_has_no_name_and_no_idle_blanks() -> None:
    """Renaming a metric, or laying it out differently, leaves its text."""
    text = "from(Service.latency).filter(status==true).longAvg()"
    assert one("a = from( Service . latency )\n.filter( status == true ).longAvg( ) ;").text == text


numbers = st.integers(0, 2**63 - 1)
texts = st.text(st.characters(codec="utf-8"), max_size=12)
plain = st.sampled_from(["name", "rpcStatusCode", "sideCar.internalErrorCode"]).map(path)
tagged = texts.map(lambda key: Path(("tag", MapKey(key)), STRINGS))
strings = plain | tagged
cast = strings.map(lambda field_path: Path(field_path.parts, LONGS, cast="long"))
wholes = cast | st.sampled_from(["latency", "sideCar.internalRequestLatencyNanos"]).map(path)
kinds = st.sampled_from(SERVICE.fields["type"].type.values)
several = st.lists(texts, min_size=1, max_size=3).map(lambda values: tuple(sorted(set(values))))
some_ints = st.lists(numbers, min_size=1, max_size=3).map(lambda values: tuple(sorted(set(values))))
conditions = st.one_of(
    st.builds(Condition, strings, st.sampled_from(["==", "!=", "like"]), texts),
    st.builds(Condition, strings | wholes, st.sampled_from(["==", "!="]), st.none()),
    st.builds(Condition, strings, st.just("in"), several),
    st.builds(Condition, wholes, st.sampled_from(["==", "!=", ">", "<", ">=", "<="]), numbers),
    st.builds(Condition, wholes, st.just("in"), some_ints),
    st.builds(Condition, st.just(path("status")), st.sampled_from(["==", "!="]), st.booleans()),
    st.builds(Condition, st.just(path("type")), st.sampled_from(["==", "!="]), kinds),
    st.builds(Condition, st.just(path("layer")), st.just("=="), texts),
    st.builds(Condition, st.just(path("tags")), st.sampled_from(["contain", "not contain"]), texts),
)
calls = st.one_of(
    st.tuples(st.sampled_from(["cpm", "count"]), st.none() | wholes | strings, st.just(())),
    st.tuples(st.sampled_from(["sum", "longAvg", "doubleAvg", "max", "min"]), wholes, st.just(())),
    st.tuples(st.just("percent"), st.none(), st.tuples(conditions)),
    st.tuples(st.just("rate"), st.none(), st.tuples(conditions, conditions)),
    st.tuples(st.just("apdex"), wholes, st.tuples(strings, st.just(path("status")))),
    st.tuples(
        st.sampled_from(["percentile", "percentile2"]), wholes, st.tuples(st.integers(1, 99))
    ),
    st.tuples(st.just("histogram"), wholes, st.tuples(st.integers(1, 99), st.integers(1, 99))),
    st.tuples(st.just("labelCount"), st.none(), st.tuples(strings | wholes)),
    st.tuples(st.just("labelAvg"), st.none(), st.tuples(strings, wholes)),
)
metrics = st.builds(
    lambda name, filters, call, decorator: Metric(
        name, "Service", call[1], tuple(filters), call[0], call[2], decorator
    ),
    st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,9}", fullmatch=True),
    st.lists(conditions, max_size=4),
    calls,
    st.none() | st.sampled_from(["ServiceDecorator", 'odd "one"']),
)


@given(st.lists(metrics, max_size=4, unique_by=lambda metric: metric.name))
def test_what_is_written_out_reads_back_the_same(made: list[Metric]) -> None:
    """Printing a script and parsing it gives an equal script, states and all."""
    script = oal.Script("f", tuple(made), ("gone",))
    back = oal.parse(str(script))
    assert back == script
    assert [metric.states for metric in back.metrics] == [metric.states for metric in made]


def test_metrics_travel() -> None:
    """Spark ships definitions between processes: they pickle, and stay equal and hashable."""
    script = oal.load(oal.core_script())
    back = pickle.loads(pickle.dumps(script.metrics))
    assert back == script.metrics
    assert {hash(metric) for metric in back} == {hash(metric) for metric in script.metrics}


# Several scripts


def test_a_folder_is_read_in_order(tmp_path: File) -> None:
    """Every *.oal in it, at any depth, sorted; nothing else."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.oal").write_text("b = from(Service.*).cpm();")
    (tmp_path / "a.oal").write_text("a = from(Service.*).cpm();")
    (tmp_path / "sub" / "c.oal").write_text("c = from(Service.*).cpm();")
    (tmp_path / "d.txt").write_text("not a script")
    assert [metric.name for metric in oal.load(tmp_path)] == ["a", "b", "c"]
    assert [metric.name for metric in oal.load(str(tmp_path))] == ["a", "b", "c"]


def test_a_file_that_is_named_twice_is_read_once(tmp_path: File) -> None:
    """Naming a folder and a file in it is no double definition."""
    file = tmp_path / "a.oal"
    file.write_text("a = from(Service.*).cpm();")
    assert len(oal.load([file, tmp_path, str(file)])) == 1


def test_files_and_texts_go_together(tmp_path: File) -> None:
    """A string with a statement in it is a script; disable reaches into the others."""
    file = tmp_path / "a (1).oal"
    file.write_text("a = from(Service.*).cpm(); b = from(Service.*).count();")
    loaded = oal.load([str(file), "disable(a); disable(unheard_of)", "c = from(Service.*).cpm()"])
    assert [result.name for result in loaded] == ["b", "c"]
    assert loaded.disabled == {"a", "unheard_of"}
    assert loaded["c"].where.file == "<string 3>"


def test_a_set_is_looked_up_by_name_and_source() -> None:
    """By name, with an error that knows better ones; by source, each state once."""
    loaded = oal.load("a = from(Service.*).cpm(); b = from(Service.latency).longAvg();")
    assert ("a" in loaded, "z" in loaded) == (True, False)
    assert loaded["a"].function == "cpm"
    with pytest.raises(sources.UnknownNameError, match="metric"):
        loaded["c"]
    assert list(loaded.by_source()) == ["Service"]
    assert loaded.states("Service") == (Count(()), loaded["b"].states[0])


def test_metrics_of_ones_own_event_types() -> None:
    """A catalog with another source serves its metrics too."""
    mine = sources.SourceType(
        "Mine", {"id": sources.Field("id", STRINGS), "n": sources.Field("n", LONGS)},
        sources.given("id"),
    )  # fmt: skip
    known = sources.builtin_catalog().with_source(mine)
    text = "m = from(Mine.n).sum();"
    assert oal.parse(text, catalog=known).metrics[0].source == "Mine"
    with pytest.raises(OalErrors, match="unknown source"):
        oal.parse(text, catalog=sources.builtin_catalog())


# The core metrics


def test_the_core_metrics_have_their_customary_names() -> None:
    """What dashboards ask for is there."""
    core = oal.load(oal.core_script())
    wanted = {
        *(f"service_{suffix}" for suffix in ("cpm", "resp_time", "sla", "percentile", "apdex")),
        *(f"endpoint_{suffix}" for suffix in ("cpm", "resp_time", "sla", "percentile")),
        *(f"service_relation_{side}_cpm" for side in ("client", "server")),
        *(f"service_instance_relation_{side}_call_sla" for side in ("client", "server")),
        "endpoint_relation_resp_time",
        "database_access_percentile",
        "cache_read_cpm",
        "mq_service_consume_latency",
        "gen_ai_model_ttft_avg",
        "instance_jvm_cpu",
    }
    assert wanted - {result.name for result in core} == set()


def test_core_metrics_share_their_count() -> None:
    """cpm, average, success and apdex of a service count its rows once."""
    core = oal.load(oal.core_script())
    names = ("cpm", "resp_time", "sla", "apdex")
    assert {core[f"service_{name}"].states[-1] for name in names} == {Count(())}


def test_the_core_script_is_laid_out_in_reading_order() -> None:
    """It names each metric once, and every line of it is a comment, a statement or blank."""
    lines = oal.core_script().read_text("utf-8").splitlines()
    assert [line for line in lines if not re.match(r"(//|[a-z0-9_]+ += from\(.*;$|$)", line)] == []


def test_what_metrics_cost() -> None:
    """States, those shared with other metrics, and whether a map is among them."""
    rows = oal.describe(
        oal.load(
            "a = from(Service.*).filter(status == true).cpm(); b = from(Service.latency).longAvg();"
            "c = from(Service.*).percent(status == true);"
            "d = from(Service.latency).percentile2(10);"
            'e = from(Endpoint.*).cpm().decorator("EndpointDecorator");'
        )
    )
    assert [(row.metric, row.states, row.shared, row.needs_map) for row in rows] == [
        ("a", 1, 1, False),
        ("b", 2, 1, False),
        ("c", 2, 2, False),
        ("d", 1, 0, True),
        ("e", 1, 0, False),
    ]
    assert [row.cost for row in rows[2:4]] == ["2 states, 2 shared", "1 state, map"]
    assert (rows[0].measured, rows[0].filters) == ("*", ("status==true",))
    assert (rows[3].measured, rows[3].function) == ("latency", "percentile2(10)")
    assert rows[4].decorator == "EndpointDecorator"
