"""The Prometheus API: plain selectors, answered as a Prometheus does that was written to."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from batchmill.export import RemoteWriter, RemoteWriteSettings
from batchmill.sources import Grain
from batchmill.store import Store, open_store
from batchmill.web.promql.api import moments
from batchmill.web.promql.parser import Matcher, parse, parse_selector
from batchmill.web.responses import BadRequest
from tests.kit.servers.prometheus import Prometheus, running_prometheus
from tests.kit.threads import until
from tests.web.kit import START_S, Call, CallWriter, Client, bucket_of, serving, serving_all

NAMES = ("shop", 'ca"rt', "gate\\1")
CPM = "batchmill_service_cpm"


def _write(store: Store, newest_s: int) -> None:
    """Minutes up to the newest, with holes, of three services."""
    CallWriter(store).write(
        [
            Call(name, newest_s - 60 * ago, 10 * (ago + 1) + n, endpoint=f"/{n}")
            for n, name in enumerate(NAMES)
            for ago in range(9)
            if (ago + n) % 4 and not (n == 2 and ago < 3)
            for _ in range(n + 1)
        ]
        + [Call("shop", newest_s)]
    )


def _matrix(client: Client, text: str, start_s: float, end_s: float, step: Any = 60) -> Any:
    answer = client.get("/api/v1/query_range", query=text, start=start_s, end=end_s, step=step)
    assert answer["data"]["resultType"] == "matrix"
    return {
        tuple(sorted(result["metric"].items())): {
            at: float(value) for at, value in result["values"]
        }
        for result in answer["data"]["result"]
    }


def _vector(client: Client, text: str, at_s: float) -> list[tuple[dict[str, str], float]]:
    data = client.get("/api/v1/query", query=text, time=at_s)["data"]
    assert data["resultType"] == "vector"
    return [(result["metric"], float(result["value"][1])) for result in data["result"]]


def _value(client: Client, at_s: float, name: str = "shop") -> float | None:
    samples = _vector(client, f'{CPM}{{name="{name}"}}', at_s)
    return samples[0][1] if samples else None


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store of calls up to START_S."""
    store_url = f"sqlite:///{tmp_path_factory.mktemp('prometheus')}/store.db"
    with open_store(store_url) as store:
        _write(store, START_S)
    return store_url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Client]:
    """A server over it."""
    with serving_all(url) as api_client:
        yield api_client


def test_a_minute_is_a_sample_at_its_end(client: Client, url: str) -> None:
    """It is there once the next minute has begun, and until that one is over."""
    with open_store(url) as store:
        values = {value.bucket: value.value for value in store.values("service_cpm", entity="shop")}
    assert values[202402291159] == 1
    assert _value(client, START_S) == 1  # the end of 11:59
    assert _value(client, START_S + 59.9) == 1
    # 12:00 has begun, but no minute behind it has: it is not complete, and 11:59 is kept.
    assert _value(client, START_S + 60) == 1
    assert _value(client, START_S + 299) == 1
    assert _value(client, START_S + 300) is None  # five minutes, as Prometheus looks back
    assert _value(client, START_S - 3 * 60) is None  # 11:56 has none, and is complete


def test_labels_and_names_are_those_of_the_exporters(client: Client) -> None:
    """Name, entity, kind, layer; and a label for each number of a labelled metric."""
    ((labels, _),) = _vector(client, f'{CPM}{{name="shop"}}', START_S)
    assert labels == {
        "__name__": CPM,
        "entity_id": "c2hvcA==.1",
        "name": "shop",
        "kind": "service",
        "layer": "GENERAL",
    }
    samples = _vector(client, 'batchmill_service_percentile{name="shop"}', START_S)
    assert [result[0]["label"] for result in samples] == ["p50", "p75", "p90", "p95", "p99"]


@pytest.mark.parametrize(
    ("matchers", "names"),
    [
        ("", {"shop", 'ca"rt'}),
        ('{name="shop"}', {"shop"}),
        ("{name='ca\"rt'}", {'ca"rt'}),
        ('{name="ca\\"rt",}', {'ca"rt'}),
        ('{name=`ca"rt`}', {'ca"rt'}),
        ('{name!="shop"}', {'ca"rt'}),
        ('{name=~"s.*|x"}', {"shop"}),
        ('{name=~"sho"}', set()),
        ('{name!~"s.+", kind="service"}', {'ca"rt'}),
        ('{other=""}', {"shop", 'ca"rt'}),
        ('{other!=""}', set()),
        ('{name="shop", layer=~".*MESH.*"}', set()),
    ],
)
def test_matchers(client: Client, matchers: str, names: set[str]) -> None:
    """Equal or not, matching as a whole or not; a label that is not there is empty."""
    samples = _vector(client, CPM + matchers, START_S)
    assert {labels["name"] for labels, _ in samples} == names
    by_name = f'{{__name__="{CPM}"{"," if matchers else ""}{matchers[1:-1]}}}'
    assert _vector(client, by_name, START_S) == samples


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("rate(x[5m])", "there is more behind the selector"),
        ("x offset 5m", "offset and @ are not"),
        ("x @ 5", "offset and @ are not"),
        ("x[5m]", "there is more behind the selector"),
        ("sum(x)", "there is more behind the selector"),
        ("x + y", "there is more behind the selector"),
        ("", "begins with a name"),
        ("{}", "at least one matcher"),
        ('{a=""}', "at least one matcher"),
        ('x{a=~"("}', "a regular expression is not valid for RE2: missing )"),
        ('x{a="b"', ", or } is expected"),
        ('x{a="b', "a text has no end"),
        ("x{a=b}", "a text in quotes"),
        ('x{a="\\q"}', "an escape sequence is not valid"),
        ('x{__name__="y"}', "the name is given already"),
        ('x{a<"b"}', "one of =, !=, =~ and !~"),
    ],
)
def test_what_is_not_understood_is_said_so(text: str, reason: str) -> None:
    """With what would be understood."""
    with pytest.raises(BadRequest) as refused:
        parse(text)
    assert reason in refused.value.reason


def test_a_bad_query_is_bad_data(client: Client) -> None:
    """400, in Prometheus' own form."""
    for path in ("/api/v1/query", "/api/v1/query_range"):
        for text in ("rate(x[5m])", ""):
            status, answer = client.ask(path, query=text, start=0, end=60, step=15)
            assert (status, answer["status"], answer["errorType"]) == (400, "error", "bad_data")


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"start": 0, "end": 11_001, "step": 1}, "exceeded maximum resolution of 11,000 points"),
        ({"start": 60, "end": 0, "step": 1}, "must not be before start"),
        ({"start": 0, "end": 1, "step": 0}, "zero or negative"),
        ({"start": 0, "end": 1, "step": "1x"}, "valid duration"),
        ({"start": "x", "end": 1, "step": 1}, "valid timestamp"),
        ({"start": 0, "end": 1}, '"step": it is missing'),
    ],
)
def test_ranges_have_bounds(params: dict[str, Any], reason: str) -> None:
    """As Prometheus has them, and says them."""
    with pytest.raises(BadRequest) as refused:
        moments({name: [str(value)] for name, value in params.items()})
    assert reason in refused.value.reason


def test_what_grafana_asks_beside(client: Client) -> None:
    """Whether anybody is there, which labels, values, series and metrics there are."""
    days = {"start": START_S - 600, "end": START_S}
    scalar = client.get("/api/v1/query", query="1+1")["data"]
    assert (scalar["resultType"], scalar["result"][1]) == ("scalar", "2")
    assert "version" in client.get("/api/v1/status/buildinfo")["data"]
    assert client.get("/api/v1/labels")["data"] == [
        *("__name__", "entity_id", "kind", "label", "layer", "name"),
    ]
    values = client.get("/api/v1/label/name/values", **{"match[]": CPM}, **days)["data"]
    assert values == sorted(NAMES)
    names = client.get("/api/v1/label/__name__/values")["data"]
    assert CPM in names
    assert client.get("/api/v1/label/kind/values")["data"] == [
        *("endpoint", "instance", "service"),
    ]
    series = client.get("/api/v1/series", **{"match[]": f'{CPM}{{name="shop"}}'}, **days)
    assert [result["entity_id"] for result in series["data"]] == ["c2hvcA==.1"]
    assert client.get("/api/v1/metadata", metric=CPM)["data"] == {
        CPM: [{"type": "gauge", "help": "from(Service.*).cpm(), of one minute", "unit": ""}]
    }


def test_a_form_is_as_good_as_an_address(client: Client) -> None:
    """Grafana posts its queries."""
    form = urlencode({"query": CPM, "time": START_S})
    posted = client.ask("/api/v1/query", "POST", form)
    assert posted == client.ask("/api/v1/query", query=CPM, time=START_S)
    assert len(posted[1]["data"]["result"]) == 2


def test_a_store_that_is_away_is_unavailable(tmp_path: Path) -> None:
    """503, in Prometheus' own form."""
    with serving(f"sqlite:///{tmp_path}/none.db") as client:
        status, answer = client.ask("/api/v1/query", query=CPM)
    assert (status, answer["status"], answer["errorType"]) == (503, "error", "unavailable")


def test_a_selector_knows_its_name() -> None:
    """Comments and blanks mean nothing, and the name is a matcher like any other."""
    text = 'x:y { a = "b" , # why\n c!~`d` }'
    assert parse_selector(text).matchers == (
        Matcher.of("__name__", "=", "x:y"),
        Matcher.of("a", "=", "b"),
        Matcher.of("c", "!~", "d"),
    )
    with pytest.raises(BadRequest, match="more than 32,768 characters"):
        parse("x" * 40_000)


def test_a_prometheus_that_was_written_to_answers_the_same(tmp_path: Path) -> None:
    """The same minutes by remote write: the same series and values, at any moment and step."""
    newest_s = int(time.time()) // 60 * 60
    url = f"sqlite:///{tmp_path}/store.db"
    settings = RemoteWriteSettings(poll_s=0.02, late_minutes=0)
    with (
        running_prometheus(tmp_path / "peer") as peer,
        open_store(url) as store,
        serving(url) as client,
    ):
        with RemoteWriter(store, peer.remote_write, tmp_path / "position", settings) as writer:
            until(lambda: writer._from_start)
            _write(store, newest_s)
            complete = bucket_of(Grain.MINUTE, newest_s - 60)
            until(lambda: writer.stats().minute == complete)
        for text in (
            CPM,
            'batchmill_service_percentile{label=~"p9.",name!="shop"}',
            'batchmill_endpoint_cpm{name=~"/[01]"}',
            '{__name__=~"batchmill_service_(sla|apdex)"}',
        ):
            assert _matrix(client, text, newest_s - 700, newest_s - 1, 37) == _query_range(
                peer, text, newest_s - 700, newest_s - 1, 37
            )
            for at_s in (newest_s - 250.5, newest_s - 1, newest_s + 200):
                assert _unordered(_vector(client, text, at_s)) == _unordered(peer.query(text, at_s))


def _query_range(peer: Prometheus, text: str, start_s: float, end_s: float, step: int) -> Any:
    params = {"query": text, "start": start_s, "end": end_s, "step": step}
    status, body = peer._get(f"/api/v1/query_range?{urlencode(params)}")
    assert status == 200, body
    return {
        tuple(sorted(load["metric"].items())): {at: float(value) for at, value in load["values"]}
        for load in json.loads(body)["data"]["result"]
    }


def _unordered(samples: list[tuple[dict[str, str], float]]) -> dict[Any, float]:
    assert all(math.isfinite(value) for _, value in samples)
    return {tuple(sorted(labels.items())): value for labels, value in samples}
