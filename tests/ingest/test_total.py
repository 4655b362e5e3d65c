"""The status and the limits of several receivers as one."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from batchmill.errors import ConfigError
from batchmill.http import handover_pair
from batchmill.ingest import (
    Limits,
    ParentLink,
    Place,
    ReceiverSettings,
    check_shares,
    ended_status,
    total_status,
)
from batchmill.telemetry.exposition import render_telemetry_of
from tests.kit.threads import until

MIB = 2**20


def status(spans: int = 10, **changes: Any) -> dict[str, Any]:
    """The status of a receiver that acknowledged ``spans``."""
    forwarded = {"to": "kafka://k/t", "offered": 7, "sent": 4, "dropped": {"full": 1}}
    measures = [
        {
            "name": "queue rows",
            "value": spans,
            "warning": 50,
            "critical": 100,
            "critical_plus": 150,
        },
        {"name": "unread bytes", "value": 900, "warning": 1000, "critical": 2000},
    ]
    sink = {"name": "spool", "kind": "batcher", "depth": spans, "capacity": 100, "moves": 0}
    sink |= {"partitions": [{"depth": spans, "capacity": 100}], "threads": [{"name": "t"}]}
    sink |= {"last_moves": [], "accepted": spans, "rejected": {"pressure": 1}}
    plain = {
        "decoder": "compiled",
        "received_spans": spans,
        "acknowledged_spans": spans,
        "unacknowledged_spans": 0,
        "rejected": {"no trace id": 1},
        "cuts": {},
        "refused_requests": {"busy": 1},
        "discarded_requests": {"logs": 2},
        "requests": {"http ok": 3, "http busy": 1},
        "connections": {"open": 2, "accepted": 5, "refused": 1},
        "grpc_connections": {"open": 1, "accepted": 1, "refused": 0},
        "requests_under_way": 1,
        "bytes_under_way": 100,
        "queue_rows": spans,
        "unread_bytes": 900,
        "unread_segments": 9,
        "level": "NORMAL",
        "forwarded": {"traces": {**forwarded, "in_hand": 2, "in_hand_bytes": 20}},
        "thresholds": {"level": "NORMAL", "why": "", "free_bytes": 5, "measures": measures},
        "queues": [sink],
        "levels": [{"name": "to kafka", "level": "WARNING", "value": 1, "decisions": {"a": 1}}],
    }
    return plain | changes


def test_counters_and_what_is_in_progress_are_added() -> None:
    """By reason, too."""
    total = total_status([status(10), status(5, rejected={"no span id": 1})])
    assert (total["received_spans"], total["acknowledged_spans"]) == (15, 15)
    assert total["rejected"] == {"no trace id": 1, "no span id": 1}
    assert total["requests"] == {"http ok": 6, "http busy": 2}
    assert total["connections"] == {"open": 4, "accepted": 10, "refused": 2}
    assert total["grpc_connections"] == {"open": 2, "accepted": 2, "refused": 0}
    assert (total["requests_under_way"], total["bytes_under_way"]) == (2, 200)
    assert total["queue_rows"] == 15
    traces = total["forwarded"]["traces"]
    assert (traces["to"], traces["offered"], traces["dropped"]) == ("kafka://k/t", 14, {"full": 2})


def test_what_all_of_them_measure_is_not_added() -> None:
    """The folder of the spool is the same; memory is not."""
    total = total_status([status(10), status(5, unread_bytes=901)])
    assert (total["unread_bytes"], total["unread_segments"]) == (901, 9)
    rows, unread = total["thresholds"]["measures"]
    assert (rows["value"], rows["critical"]) == (15, 200)
    assert (unread["value"], unread["critical"]) == (900, 2000)


def test_the_highest_level_is_that_of_all() -> None:
    """With its reason."""
    critical = {**status()["thresholds"], "level": "CRITICAL", "why": "too much waits"}
    total = total_status([status(), status(level="CRITICAL", thresholds=critical), status()])
    assert (total["level"], total["thresholds"]["why"]) == ("CRITICAL", "too much waits")


def test_queues_of_one_name_are_one() -> None:
    """With the partitions and threads of all."""
    total = total_status([status(10), status(5)])
    (queue,) = total["queues"]
    assert (queue["depth"], queue["capacity"], queue["accepted"]) == (15, 200, 15)
    assert [partition["depth"] for partition in queue["partitions"]] == [10, 5]
    assert (len(queue["threads"]), queue["rejected"]) == (2, {"pressure": 2})
    (level,) = total["levels"]
    assert (level["level"], level["value"], level["decisions"]) == ("WARNING", 2, {"a": 2})


def test_a_receiver_that_ended_stays_in_the_counters() -> None:
    """What it had in progress is not acknowledged, and what it was to forward is dropped."""
    past = ended_status(status(10, received_spans=14, unacknowledged_spans=1))
    total = total_status([status(5)], [past])
    assert (total["received_spans"], total["acknowledged_spans"]) == (19, 15)
    assert total["unacknowledged_spans"] == 4
    assert total["connections"] == {"open": 2, "accepted": 10, "refused": 2}
    assert (total["requests_under_way"], total["queue_rows"]) == (1, 5)
    traces = total["forwarded"]["traces"]
    assert traces["dropped"] == {"full": 2, "process died": 2}
    assert traces["offered"] == traces["sent"] + sum(traces["dropped"].values()) + traces["in_hand"]


def test_several_that_ended_are_one() -> None:
    """A total of past counters is a past counter, too."""
    past = [ended_status(status(1)), ended_status(status(2))]
    one = total_status([status(5)], [total_status((), past)])
    assert one == total_status([status(5)], past)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_shares_add_up(count: int) -> None:
    """To the limit, and none is larger than another by more than one."""
    places = [Place(number, count, 0, 0, 0, 1, 2) for number in range(1, count + 1)]
    whole = ReceiverSettings(max_connections=1000, max_requests=2000)
    shares = [place.settings(whole) for place in places]
    for name in ("max_connections", "max_requests", "max_bytes"):
        parts = [getattr(share, name) for share in shares]
        assert sum(parts) == getattr(whole, name)
        assert max(parts) - min(parts) <= 1
    assert {(share.http_port, share.grpc_port) for share in shares} == {(1, 2)}


def test_a_place_is_read_from_the_command_line() -> None:
    """As it was written there."""
    place = Place(2, 3, 7, 8, 9, 4318, 4317)
    assert Place.parse(str(place)) == place


def test_limits_that_are_too_small_to_be_divided() -> None:
    """Each process must be able to take a connection, and the largest body."""
    check_shares(ReceiverSettings(max_connections=4), Limits(), 4)
    with pytest.raises(ConfigError, match=r"processes=5 .* at most 4, .* max_connections"):
        check_shares(ReceiverSettings(max_connections=4), Limits(), 5)
    with pytest.raises(ConfigError, match=r"processes=3 .* at most 2, .* max_bytes"):
        check_shares(ReceiverSettings(max_bytes=200 * MIB), Limits(max_body_bytes=100 * MIB), 3)


def test_a_worker_knows_what_the_parent_tells() -> None:
    """The total, and of it which of the others hangs; the parent gets its status."""
    http, taking_http = handover_pair()
    grpc, taking_grpc = handover_pair()
    here, there = socket.socketpair()
    with http, grpc, here, here.makefile("rb") as reports:
        ends = taking_http.detach(), taking_grpc.detach(), there.detach()
        link = ParentLink(Place(1, 2, *ends, 1, 2))
        assert link.faults() == []
        workers = [{"silent_s": 0.2}, {"silent_s": 29.0}]
        here.sendall(json.dumps({"level": "WARNING", "workers": workers}).encode() + b"\n")
        assert link.total()["level"] == "WARNING"
        assert link.faults() == []
        workers[1]["silent_s"] = 31.0
        here.sendall(json.dumps({"workers": workers}).encode() + b"\n")
        assert until(link.faults) == ["worker 2 has not reported for 31 s"]
        link.report({"received_spans": 3})
        assert json.loads(reports.readline()) == {"received_spans": 3}
        link.close()


def test_a_page_has_the_components_of_all_processes() -> None:
    """Each family once, with the process as a label."""
    family = ["queue_depth", "Depth.", "gauge", [["queue_depth", {"queue": "a"}, 3]]]
    page = render_telemetry_of("process", {"1": [family], "2": [family]}).decode()
    assert page.count("# HELP queue_depth Depth.") == 1
    assert 'queue_depth{process="1",queue="a"} 3.0' in page
    assert 'queue_depth{process="2",queue="a"} 3.0' in page
