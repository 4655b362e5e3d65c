"""The plan of the simulated shop: pure, so without the SDK and without a clock."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest

from batchmill.demo.steps import INSTANCES, Request, Step
from batchmill.demo.traffic import LONGEST_S, SWING, WAVE_S, plan, rate_at

SLOW_US = 200_000


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    """Five minutes of an ordinary day."""
    return list(plan(7, 20, 300))


@pytest.fixture(scope="module")
def steps(requests: list[Request]) -> list[tuple[Step, Step | None]]:
    """All steps with their parents."""
    return [pair for request in requests for pair in request.root.family()]


def test_same_seed_gives_the_same_plan() -> None:
    """A plan depends on its seed, its rate and its length."""
    assert list(plan(3, 20, 10)) == list(plan(3, 20, 10))
    assert list(plan(3, 20, 10)) != list(plan(4, 20, 10))


def test_longer_run_begins_like_a_shorter_one() -> None:
    """How long a run lasts changes nothing of what happens until then; neither does no end."""
    short = list(plan(3, 20, 5))
    assert list(islice(plan(3, 20, 60), len(short))) == short
    assert list(islice(plan(3, 20), len(short))) == short


def test_eight_services_take_part(steps: list[tuple[Step, Step | None]]) -> None:
    """There are eight of them, all with spans, in all of their processes."""
    assert len(INSTANCES) == 8
    seen = {(step.service, step.instance) for step, _ in steps}
    assert seen == {(service, one) for service, all_ in INSTANCES.items() for one in all_}


def test_only_the_visitor_s_request_has_no_parent(
    requests: list[Request], steps: list[tuple[Step, Step | None]]
) -> None:
    """Every step but the gateway's first has a parent; requests are numbered in their order."""
    roots = [step for step, parent in steps if parent is None]
    assert [request.root for request in requests] == roots
    assert {(root.service, root.kind) for root in roots} == {("gateway", "SERVER")}
    assert [request.index for request in requests] == list(range(len(requests)))
    offsets = [request.offset_us for request in requests]
    assert offsets == sorted(offsets)


def test_services_meet_in_calls_and_messages_only(
    steps: list[tuple[Step, Step | None]],
) -> None:
    """Where the service changes, a call is served or a message consumed; nowhere else."""
    changes = Counter(
        (parent.kind, step.kind, parent.service != step.service)
        for step, parent in steps
        if parent is not None
    )
    apart = {kinds[:2] for kinds in changes if kinds[2]}
    assert apart == {("CLIENT", "SERVER"), ("PRODUCER", "CONSUMER")}
    assert not apart & {kinds[:2] for kinds in changes if not kinds[2]}


def test_steps_lie_within_their_parents(steps: list[tuple[Step, Step | None]]) -> None:
    """A child begins and ends while its parent goes on; a message is consumed after it was sent."""
    for step, parent in steps:
        assert step.duration_us > 0
        if parent is None:
            continue
        if step.kind == "CONSUMER":
            assert step.start_us > parent.end_us
        else:
            assert parent.start_us <= step.start_us < step.end_us <= parent.end_us


def test_no_request_outlasts_the_longest(requests: list[Request]) -> None:
    """The driver runs that far behind the clock, so that no span ends in the future."""
    assert max(request.last_us for request in requests) < LONGEST_S * 1_000_000


def test_databases_run_statements_some_of_them_slow(
    steps: list[tuple[Step, Step | None]],
) -> None:
    """Two systems, by the newer and the older conventions; 1 to 10 % are above 200 ms."""
    spoken: Counter[tuple[object, object]] = Counter()
    slow: Counter[bool] = Counter()
    for step, _ in steps:
        about = dict(step.attributes)
        new, old = about.get("db.query.text"), about.get("db.statement")
        system = about.get("db.system.name", about.get("db.system"))
        if system in (None, "redis"):
            continue
        assert step.kind == "CLIENT"
        assert (new is None) != (old is None)
        spoken[system, new is None] += 1
        slow[step.duration_us > SLOW_US] += 1
    assert set(spoken) == {("postgresql", False), ("mysql", True)}
    assert 0.01 < slow[True] / slow.total() < 0.1


def test_cache_is_read_and_written(steps: list[tuple[Step, Step | None]]) -> None:
    """The cache sees commands of both kinds; a few are above its 10 ms."""
    commands = [
        (step.name, step.duration_us > 10_000)
        for step, _ in steps
        if "redis" in dict(step.attributes).values()
    ]
    assert {"GET", "HGETALL", "SET", "HSET"} <= {name for name, _ in commands}
    assert 0 < sum(slow for _, slow in commands) < 0.05 * len(commands)


def test_queue_brings_messages_to_two_consumers(
    steps: list[tuple[Step, Step | None]],
) -> None:
    """Each message is taken by shipping and by mail, from the topic and the broker it went to."""
    sent = [step for step, _ in steps if step.kind == "PRODUCER"]
    assert sent
    for step in sent:
        assert [child.service for child in step.children] == ["shipping", "mail"]
        for message in (step, *step.children):
            about = dict(message.attributes)
            assert about["messaging.system"] == "kafka"
            assert about["messaging.destination.name"] == "orders"
            assert about["server.address"] == "kafka.shop"


def test_errors_happen_and_reach_the_visitor(requests: list[Request]) -> None:
    """Some requests fail, most do not; a status above 499 is an error of the server's span."""
    statuses = Counter(
        dict(request.root.attributes)["http.response.status_code"] for request in requests
    )
    assert {200, 201, 404, 500, 503} <= set(statuses)
    failed = sum(bool(request.root.error) for request in requests)
    assert failed == statuses[500] + statuses[503]
    assert 0 < failed < 0.05 * len(requests)


def test_calls_have_an_http_status_or_a_grpc_code(
    steps: list[tuple[Step, Step | None]],
) -> None:
    """What serves says how it ended, by one of the conventions."""
    codes = {"http.response.status_code", "http.status_code", "rpc.grpc.status_code"}
    attributes = Counter(
        key for step, _ in steps if step.kind == "SERVER" for key, _ in step.attributes
    )
    served = sum(step.kind == "SERVER" for step, _ in steps)
    assert sum(attributes[code] for code in codes) == served
    assert all(attributes[code] for code in codes)


def test_traffic_comes_in_waves(requests: list[Request]) -> None:
    """The quarter around each crest has about as much more than the trough's as was planned."""
    assert (rate_at(0, 20), rate_at(WAVE_S / 4, 20)) == (20, 20 * (1 + SWING))
    quarters = Counter(
        int(request.offset_us / 1_000_000 / WAVE_S * 4 + 0.5) % 4 for request in requests
    )
    assert len(requests) == pytest.approx(20 * 300, rel=0.06)
    assert quarters[1] > 2.5 * quarters[3]
