"""The flow map against a plain model of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from batchmill.flows.flow_map import Entry, Flow, FlowMap

WORKERS = 3
KEYS = st.sampled_from("abcdef")


@dataclass
class Life:
    """What the model knows about a flow."""

    worker: int
    pending: int = 0
    waiting: int = 0
    is_open: bool | None = None
    idle_since: float = field(default=0.0)

    @property
    def idle(self) -> bool:
        return bool(self.is_open) and not self.pending and not self.waiting


def entry(flow: Flow) -> Entry:
    """A queued signal of the flow, whatever it may be."""
    return (None, flow, False, 0.0, 0)


class FlowMapMachine(RuleBasedStateMachine):
    @initialize(
        ttl=st.one_of(st.none(), st.integers(1, 5)), most=st.one_of(st.none(), st.integers(1, 4))
    )
    def begin(self, ttl: int | None, most: int | None) -> None:
        self.now = 0.0
        self.ttl = ttl
        self.most = most
        self.homes = [SimpleNamespace(flows=0) for _ in range(WORKERS)]
        self.flows = FlowMap(self.homes, ttl, most)
        self.model: dict[str, Life] = {}
        self.assigned = 0
        self.completed = 0
        self.expired = 0
        self.displaced = 0

    @rule(key=KEYS, finish=st.booleans(), worker=st.integers(0, WORKERS - 1))
    def accept(self, key: str, finish: bool, worker: int) -> None:
        if self._known_or_added(key, worker):
            self.flows.accept(self._flow(key), finish)
            life = self.model[key]
            self.assigned += life.is_open is None
            life.pending += 1
            life.is_open = not finish

    @rule(key=KEYS, worker=st.integers(0, WORKERS - 1))
    def wait(self, key: str, worker: int) -> None:
        if self._known_or_added(key, worker):
            self.flows.wait(self._flow(key))
            self.model[key].waiting += 1

    @precondition(lambda self: any(life.pending for life in self.model.values()))
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from([k for k, life in self.model.items() if life.pending]))
        count = data.draw(st.integers(1, self.model[key].pending))
        self.flows.settle([entry(self._flow(key))] * count, self.now)
        self.model[key].pending -= count
        self._rest(key)

    @precondition(lambda self: any(life.waiting for life in self.model.values()))
    @rule(data=st.data())
    def stop_waiting(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from([k for k, life in self.model.items() if life.waiting]))
        self.flows.stop_waiting(self._flow(key), self.now)
        self.model[key].waiting -= 1
        self._rest(key)

    @rule(key=KEYS)
    def finish(self, key: str) -> None:
        assert self.flows.finish(key, self.now) is (key in self.model)
        if key in self.model:
            if self.model[key].is_open:
                self.model[key].is_open = False
            self._rest(key)

    @rule(seconds=st.integers(1, 4))
    def let_time_pass(self, seconds: int) -> None:
        self.now += seconds
        due = [k for k, life in self.model.items() if self._is_due(life)]
        if due:
            assert self.flows.next_expiry <= self.now
        self.flows.expire(self.now)
        for key in due:
            del self.model[key]
            self.expired += 1

    @rule()
    def recount(self) -> None:
        """Counting anew what was counted right changes nothing."""
        lives = self.model.items()
        pending = [self._flow(key) for key, life in lives for _ in range(life.pending)]
        waiting = [self._flow(key) for key, life in lives for _ in range(life.waiting)]
        self.flows.recount(pending, waiting, self.now)

    @invariant()
    def the_map_is_the_model(self) -> None:
        if not hasattr(self, "model"):
            return
        assert len(self.flows) == len(self.model)
        for key, life in self.model.items():
            flow = self._flow(key)
            assert (flow.worker, flow.pending, flow.waiting, flow.is_open) == (
                life.worker,
                life.pending,
                life.waiting,
                life.is_open,
            )
        workers = [life.worker for life in self.model.values()]
        assert [home.flows for home in self.homes] == [workers.count(n) for n in range(WORKERS)]
        flows = self.flows
        assert (flows.assigned, flows.completed) == (self.assigned, self.completed)
        assert (flows.expired, flows.displaced) == (self.expired, self.displaced)
        assert flows.active == sum(life.is_open is not None for life in self.model.values())

    @invariant()
    def a_flow_is_known_as_long_as_it_is_open_or_something_of_it_is_left(self) -> None:
        for life in getattr(self, "model", {}).values():
            assert life.is_open or life.pending or life.waiting

    def _known_or_added(self, key: str, worker: int) -> bool:
        if key in self.model:
            return True
        full = self.most is not None and len(self.model) >= self.most
        idle = [k for k, life in self.model.items() if life.idle]
        assert self.flows.make_room() is (not full or bool(idle))
        if full:
            if not idle:
                return False
            longest = min(life.idle_since for life in self.model.values() if life.idle)
            [gone] = [k for k in idle if self.flows.get(k) is None]
            assert self.model.pop(gone).idle_since == longest
            self.displaced += 1
        self.flows.add(key, worker)
        self.model[key] = Life(worker)
        return True

    def _flow(self, key: str) -> Flow:
        flow = self.flows.get(key)
        assert flow is not None
        return flow

    def _rest(self, key: str) -> None:
        life = self.model[key]
        life.idle_since = self.now
        if not (life.pending or life.waiting or life.is_open):
            self.completed += life.is_open is not None
            del self.model[key]

    def _is_due(self, life: Life) -> bool:
        return self.ttl is not None and life.idle and life.idle_since + self.ttl <= self.now


TestFlowMap = FlowMapMachine.TestCase
TestFlowMap.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_a_reused_id_stays_where_its_past_is() -> None:
    """A finished flow keeps its worker until its last signal is out, and then lets it go."""
    flows = FlowMap([SimpleNamespace(flows=0)], None, None)
    flow = flows.add("a", 0)
    flows.accept(flow, True)
    assert flows.get("a") is flow
    flows.settle([entry(flow)], 0.0)
    assert flows.get("a") is None


def test_a_new_signal_reopens_a_finished_flow_that_has_signals_left() -> None:
    """The id's new life does not end with the old one's finish signal."""
    flows = FlowMap([SimpleNamespace(flows=0)], None, None)
    flow = flows.add("a", 0)
    flows.accept(flow, True)
    flows.accept(flow, False)
    flows.settle([entry(flow), entry(flow)], 0.0)
    assert flows.get("a") is flow


def test_a_flow_in_repr_says_where_it_stands() -> None:
    """For whoever debugs."""
    assert repr(Flow("a", 2)) == "<Flow 'a' on 2, new, 0 pending, 0 waiting>"
