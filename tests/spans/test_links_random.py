"""Random spans in random batches give the same relations, and those that the rules say."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("pyarrow")

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from batchmill.spans.links import SUMMARY_SCHEMA, Links, link
from tests.kit.spark import span
from tests.oracle.generate import random_spans
from tests.oracle.spans import counted_at_once, spans_to_events
from tests.spans.links_kit import FAR, Run, Span, compacted, forest, served, ways


def copied(spans: Iterable[Span], copy: int) -> list[Span]:
    """The same spans in a world of their own, so that many worlds are linked together."""
    return [
        original
        | {"service": f"{copy}:{original['service']}"}
        | {"trace_id": original["trace_id"] and f"{copy}:{original['trace_id']}"}
        | {
            "attributes": {
                name: f"{copy}:{value}" for name, value in original["attributes"].items()
            }
        }
        for original in spans
    ]


def by_copy(relations: Iterable[dict[str, Any]]) -> dict[int, Counter[str]]:
    """The relations of each world, counted."""
    result: dict[int, Counter[str]] = {}
    for row in relations:
        copy, _, dest = row["destService"].partition(":")
        what = f"{row['time']} {row['latency']} {row['sourceService'].partition(':')[2]}"
        what += f" {row['sourceEndpoint']}"
        key = f"{what} > {dest}/{row['endpoint']} {row['destLayer']} {row['detectPoint']}"
        result.setdefault(int(copy), Counter())[key] += 1
    return result


def ways_by_copy(messages: Iterable[dict[str, Any]]) -> dict[int, Counter[str]]:
    """The messages of each world, counted."""
    result: dict[int, Counter[str]] = {}
    for row in messages:
        copy = int(row["serviceName"].partition(":")[0])
        result.setdefault(copy, Counter())[f"{row['time']} {ways([row])}"] += 1
    return result


def test_however_spans_are_split_the_relations_are_the_same() -> None:
    """Twelve forests, each whole in one batch and split at random in five other ways."""
    rng = random.Random(20260301)
    batches: list[list[Span]] = [[] for _ in range(3)]
    groups: list[list[int]] = []
    for number in range(12):
        spans = forest(rng)
        copies = [number * 6 + place for place in range(6)]
        groups.append(copies)
        batches[0] += copied(spans, copies[0])
        for copy in copies[1:]:
            for copied_span in copied(spans, copy):
                rng.choice(batches).append(copied_span)
    run = Run()
    for batch in batches:
        run.batch(batch)
    run.end()
    for counts in (by_copy(run.relations), ways_by_copy(run.rows["MQEndpointAccess"])):
        for copies in groups:
            whole = counts.get(copies[0], Counter())
            assert [counts.get(copy, Counter()) for copy in copies[1:]] == [whole] * 5
    assert run.lost
    assert all(count % 6 == 0 for count in run.lost.values())


def test_batch_by_batch_it_is_what_a_plain_list_of_waiting_spans_gives() -> None:
    """Forty forests split at random with a window of two batches, against :class:`Model`."""
    rng = random.Random(7)
    batches: list[list[Span]] = [[] for _ in range(4)]
    for copy in range(40):
        for copied_span in copied(forest(rng), copy):
            rng.choice(batches).append(copied_span)
    run, model = Run(window=2), Model(window=2)
    for batch in (*batches, [], []):
        assert by_copy(run.batch(batch)) == by_copy(model.batch(batch))
        assert ways_by_copy(run.messages) == ways_by_copy(model.messages)
        assert run.lost == model.lost
    assert len(run.relations) > 100
    assert len(run.lost) == 2


class Model:
    """The rules once more, with a list of those who wait instead of summaries."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._number = 0
        self._known: list[tuple[int, Span]] = []
        self._waiting: list[tuple[int, Span]] = []
        self.messages: list[dict[str, Any]] = []
        self.lost: Counter[str] = Counter()

    def batch(self, spans: Sequence[Span]) -> list[dict[str, Any]]:
        self._number += 1
        new = [(self._number, new_span) for new_span in spans]
        self._known += new
        relations: list[dict[str, Any]] = []
        still = []
        self.messages = []
        for number, own in self._waiting + new:
            last = number <= self._number - self._window
            hopeless = own["trace_id"] is None
            serves = own["kind"] in ("SERVER", "CONSUMER")
            broker = own["attributes"].get("messaging.system")
            if serves and not own["parent_span_id"]:
                relations.append(_relation(own, "User", None, own))
                self._count(own, None)
            elif serves:
                parents = self._spans(trace_id=own["trace_id"], span_id=own["parent_span_id"])
                if parents:
                    # Twins are alike, but two spans may also share an id: the first one counts.
                    parent = min(
                        parents, key=lambda one: (one["time"], one["service"], one["name"])
                    )
                    calls = parent["kind"] in ("CLIENT", "PRODUCER")
                    if parent["service"] != own["service"] or calls:
                        relations.append(_relation(own, parent["service"], parent["name"], own))
                        if calls and "messaging.system" not in parent["attributes"]:
                            relations.append(_relation(parent, parent["service"], None, own))
                    self._count(own, parent)
                elif last or hopeless:
                    relations.append(_relation(own, "User", None, own))
                    self._count(own, None)
                    self.lost["parent never came"] += 1
                else:
                    still.append((number, own))
            elif own["kind"] in ("CLIENT", "PRODUCER") and broker:
                relations.append(_relation(own, own["service"], None, own | {"service": broker}))
                self._count(own, None)
            elif own["kind"] in ("CLIENT", "PRODUCER"):
                children = self._spans(trace_id=own["trace_id"], parent_span_id=own["span_id"])
                if any(one["kind"] in ("SERVER", "CONSUMER") for one in children):
                    continue  # They have told, or tell now.
                if not (last or hopeless or own["span_id"] is None):
                    still.append((number, own))
                elif peer := own["attributes"].get("peer.service"):
                    relations.append(_relation(own, own["service"], None, own | {"service": peer}))
                else:
                    self.lost["no destination"] += 1
        self._waiting = still
        # What expires now was still there for this batch.
        oldest = self._number - self._window
        self._known = [one for one in self._known if one[0] > oldest]
        return relations

    def _count(self, message: Span, sender: Span | None) -> None:
        broker = message["attributes"].get("messaging.system")
        if broker is None or message["kind"] == "SERVER":
            return
        consumed = message["kind"] == "CONSUMER"
        way = None if consumed else 0
        senders = ("CLIENT", "PRODUCER") if consumed and sender is not None else ()
        if sender and sender["kind"] in senders and "messaging.system" in sender["attributes"]:
            way = max(0, (message["time"] - sender["time"]) // timedelta(milliseconds=1))
        self.messages.append(
            {
                "serviceName": broker,
                "endpoint": message["name"],
                "operation": "Consume" if consumed else "Produce",
                "transmissionLatency": way,
                "time": message["time"],
            }
        )

    def _spans(self, **ids: str | None) -> list[Span]:
        if None in ids.values():
            return []
        return [one for _, one in self._known if ids.items() <= one.items()]


def _relation(of: Span, source: str, endpoint: str | None, dest: Span) -> dict[str, Any]:
    return {
        "sourceService": source,
        "sourceEndpoint": endpoint,
        "destService": dest["service"],
        "endpoint": dest["name"],
        "destLayer": "VIRTUAL_MQ" if dest["service"].endswith(":kafka") else "GENERAL",
        "detectPoint": "SERVER" if of["kind"] in ("SERVER", "CONSUMER") else "CLIENT",
        "time": of["time"],
        "latency": (of["end_time"] - of["time"]) // timedelta(milliseconds=1),
    }


@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**32),
    count=st.integers(1, 120),
    batches=st.integers(1, 5),
    again=st.integers(0, 10),
)
def test_random_traces_give_what_the_oracle_says(
    seed: int, count: int, batches: int, again: int
) -> None:
    """However they are split, and though some spans are delivered again in any batch."""
    rng = random.Random(seed)
    spans = random_spans(seed, count)
    spans += rng.choices(spans, k=again)
    expected = spans_to_events(spans)
    parts: list[list[Span]] = [[] for _ in range(batches)]
    for one in spans:
        rng.choice(parts).append(one)
    run = Run()
    for part in parts:
        run.batch(part)
    run.end()
    for source, rows in run.rows.items():
        assert _counted(rows) == _counted(expected.events.get(source, [])), source
    assert run.lost == +Counter(
        {
            "parent never came": expected.counters["unresolved_parent"],
            "no destination": expected.counters["unresolved_destination"],
        }
    )


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32), batches=st.integers(1, 5))
def test_random_calls_to_hosts_outside_give_what_the_oracle_says(seed: int, batches: int) -> None:
    """Each call counts once for its caller: at once for the host, or for who had answered."""
    rng = random.Random(seed)
    spans: list[Span] = []
    for number in range(rng.randint(1, 25)):
        trace = f"t{number}"
        port = rng.choice(("443", "50051"))
        host = {"server.address": f"api{rng.randrange(3)}.pay.org", "server.port": port}
        spans.append(span("c", "CLIENT", trace_id=trace, service="a", attributes=host))
        spans += [
            served(f"s{child}", "c", trace_id=trace, service="b")
            for child in range(rng.choice((0, 0, 0, 1, 2)))
        ]
    rng.shuffle(spans)
    arrived = sorted(rng.randrange(batches) for _ in spans)
    run = Run()
    for batch in range(batches):
        run.batch([one for one, own in zip(spans, arrived, strict=True) if own == batch])
    run.end()
    expected = spans_to_events(spans, counted_at_once(spans, arrived))
    for source, rows in run.rows.items():
        assert _counted(rows) == _counted(expected.events.get(source, [])), source
    assert not run.lost


@settings(max_examples=12)
@given(
    seed=st.integers(0, 2**32),
    window=st.integers(1, 3),
    speaks=st.sampled_from((0.0, 0.1, 0.5)),
)
def test_random_calls_to_hosts_that_seldom_answer_give_what_the_oracle_says(
    seed: int, window: int, speaks: float
) -> None:
    """Each call counts once for its caller, whether its host was silent, began to answer, or not.

    Of the services that answer, some spans come late, though within the wait.
    """
    rng = random.Random(seed)
    spans: list[Span] = []
    arrived: list[int] = []
    batches = 12
    for number in range(rng.randint(10, 80)):
        host = {"server.address": rng.choice(("legacy", "10.0.0.7", "api.pay.org"))}
        host |= {"server.port": "8080"}
        spans.append(span("c", "CLIENT", trace_id=f"t{number}", service="a", attributes=host))
        arrived.append(batch := rng.randrange(batches))
        for child in range(rng.choice((1, 1, 2)) if rng.random() < speaks else 0):
            spans.append(served(f"s{child}", "c", trace_id=f"t{number}", service="b"))
            arrived.append(max(0, batch + rng.randint(-window, window)))
    run = Run(window)
    for batch in range(batches + 2 * window + 1):
        run.batch([one for one, own in zip(spans, arrived, strict=True) if own == batch])
    expected = spans_to_events(spans, counted_at_once(spans, arrived, window))
    for source, rows in run.rows.items():
        assert _counted(rows) == _counted(expected.events.get(source, [])), source
    assert not run.lost


def _counted(rows: Iterable[Mapping[str, Any]]) -> Counter[str]:
    """Rows, counted. Columns of the catalog that spans do not have are null, and left out."""
    return Counter(
        str(sorted((name, str(value)) for name, value in row.items() if value is not None))
        for row in rows
    )


def test_of_several_spans_with_one_id_the_least_is_the_parent() -> None:
    """By all columns in their order, null first, in one batch or in two."""
    rng = random.Random(11)
    batches: tuple[list[Span], list[Span]] = ([], [])
    parents: dict[str, dict[str, Any]] = {}
    for number in range(60):
        spans = [_any_parent(rng) for _ in range(rng.randint(2, 5))]
        least = min(compacted(spans).to_pylist(), key=_parent_order)
        for split in range(len(spans)):
            case = f"{number}-{split}"
            parents[case] = least
            child = served("child", "p", service=case)
            for place, one in enumerate([*spans, child]):
                batches[place >= split].append(one | {"trace_id": case})
    run = Run()
    for batch in batches:
        run.batch(batch)
    views: dict[str, dict[str, Any]] = {}
    for row in run.relations:
        if row["destService"] in parents:
            views.setdefault(row["destService"], {})[row["detectPoint"]] = row
    assert views.keys() == parents.keys()
    calls = 0
    for case, parent in parents.items():
        by_point = views[case]
        source = [
            by_point["SERVER"][f"source{name}"] for name in ("Service", "Instance", "Endpoint")
        ]
        assert source == [parent["service"], parent["instance"], parent["name"]]
        is_call = parent["kind"] == "CLIENT" and parent["peer_layer"] != "VIRTUAL_DATABASE"
        assert ("CLIENT" in by_point) == is_call
        for name in _MEASURED if is_call else ():
            assert by_point["CLIENT"][name] == parent[name]
        calls += is_call
    assert 0 < calls < len(parents)


_MEASURED = (
    *("time", "latency", "latencyMicros", "status", "type"),
    *("httpResponseStatusCode", "rpcStatusCode"),
)


_CHANGES: tuple[Span, ...] = (
    {"at": 1},
    {"us": 1500},
    {"us": 2000},
    {"service": "Z"},
    {"service": "ß"},
    {"name": "y"},
    {"kind": "INTERNAL"},
    {"kind": "SERVER"},
    {"status": "ERROR"},
    {"resource": {"host.name": "h"}},
    {"attributes": {"db.system": "mysql"}},
    {"attributes": {"http.status_code": "500", "rpc.system": "grpc"}},
    {"attributes": {"rpc.grpc.status_code": "2"}},
    {"attributes": FAR},
)


def _any_parent(rng: random.Random) -> Span:
    """A call that differs from the usual one in little or nothing, so that many are alike."""
    plain: Span = {"kind": "CLIENT", "service": "a", "name": "x", "us": 1000}
    for change in rng.sample(_CHANGES, k=rng.choice((0, 1, 1, 2))):
        plain |= change
    return span("p", **plain)


_PARENT_ORDER = (
    *("time", "service", "instance", "name", "kind", "latency", "status", "type"),
    *("httpResponseStatusCode", "rpcStatusCode", "latencyMicros", "peer_layer"),
)


def _parent_order(row: Mapping[str, Any]) -> list[tuple[bool, Any]]:
    return [
        (row[name] is not None, row[name] if row[name] is not None else 0) for name in _PARENT_ORDER
    ]


class WholeRun(Run):
    """Carries whole spans on, also what summaries leave out because nobody will need it."""

    def summary(self, new: pa.Table, links: Links) -> pa.Table:
        """All columns of the spans in the summary."""
        summary = super().summary(new, links)
        kept = [
            row["trace_id"] is not None
            and (row["span_id"] is not None or _is_child(row["kind"], row["parent_span_id"]))
            for row in new.to_pylist()
        ]
        whole = new.select(SUMMARY_SCHEMA.names[:-3]).filter(pa.array(kept, pa.bool_()))
        for name in ("counted", "batch", "settled"):
            whole = whole.append_column(name, summary[name])
        return whole


def _is_child(kind: str, parent: str | None) -> bool:
    return kind in ("SERVER", "CONSUMER") and parent is not None


def test_nobody_misses_what_summaries_leave_out() -> None:
    """Batch by batch the same as with whole spans, though these are more."""
    rng = random.Random(20)
    batches: list[list[Span]] = [[] for _ in range(5)]
    for copy in range(60):
        for copied_span in copied(forest(rng), copy):
            rng.choice(batches).append(copied_span)
    run, whole = Run(window=2), WholeRun(window=2)
    for batch in (*batches, [], []):
        assert _counted(run.batch(batch)) == _counted(whole.batch(batch))
        assert _counted(run.messages) == _counted(whole.messages)
        assert run.lost == whole.lost
    assert len(run.relations) > 200
    summary = link(compacted(batches[0]), None, 1).summary
    assert 0 < len(summary) < len(batches[0])
    assert summary["peer"].null_count > len(summary) / 2


def test_pending_spans_may_come_in_any_form() -> None:
    """Texts as strings, as dictionaries with a null or a text twice; in pieces; without columns."""
    spans = forest(random.Random(3)) + forest(random.Random(5))
    half = len(spans) // 2
    new, old = compacted(spans[half:]), link(compacted(spans[:half]), None, 1).summary
    expected = link(new, old, 2, 1)
    assert len(expected.relations) > 3
    for pending in (
        old.cast(SUMMARY_SCHEMA),
        pa.table({name: _encoded(old[name]) for name in old.column_names}),
        pa.concat_tables([old.slice(place, 1) for place in range(len(old))]),
        pa.table([_odd_dictionary(column) for column in old.columns], names=old.column_names),
        old.select(old.column_names[::-1]),
        old.select([name for name in old.column_names if old[name].null_count < len(old)]),
    ):
        for arrived in (new, pa.concat_tables([new.slice(0, 2), new.slice(2)])):
            links = link(arrived, pending, 2, 1)
            assert links.relations.to_pylist() == expected.relations.to_pylist()
            assert links.accessed.to_pylist() == expected.accessed.to_pylist()
            assert links.summary.equals(expected.summary)
            assert links.unresolved == expected.unresolved


def _odd_dictionary(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column of texts as a dictionary that has null, and each text twice."""
    if not pa.types.is_dictionary(column.type):
        return column
    texts = column.to_pylist()
    words = [None, *dict.fromkeys(text for text in texts if text is not None)] * 2
    places = [words.index(text) + place % 2 * len(words) // 2 for place, text in enumerate(texts)]
    array = pa.DictionaryArray.from_arrays(
        pa.array(places, pa.int8()), pa.array(words, pa.string())
    )
    assert array.to_pylist() == texts
    return pa.chunked_array([array])


def _encoded(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return column.dictionary_encode() if pa.types.is_string(column.type) else column
