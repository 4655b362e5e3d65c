"""One soak from start to verdict."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from batchmill.run import spool_backlog
from batchmill.store import open_store
from tests.kit.processes import running_pid
from tests.kit.threads import until
from tests.soak.balance import balance, read_counted
from tests.soak.events import Director
from tests.soak.load import Bodies, Load
from tests.soak.probes import BOUNDS, Probes
from tests.soak.report import Result
from tests.soak.schedule import Plan
from tests.soak.stage import TOKEN, Stage, stage
from tests.soak.verdict import (
    Share,
    growth_problems,
    load_problems,
    plan_problems,
    shares_under_attack,
    undisturbed,
)

RECEIVERS = {"main": "ingest", "side": "side-ingest"}
"""What the senders of a road send to."""
START_S = 180.0
SETTLE_S = 600.0
"""How long everything may take to be acknowledged and committed once the traffic is over."""


def run_soak(
    plan: Plan,
    work: Path,
    say: Callable[[str], None],
    *,
    options: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    side_road: bool = True,
) -> Result:
    """Run it in the folder ``work``; ``options`` and ``env`` are those of the pipelines."""
    problems: list[str] = []
    with stage(
        work, without=plan.without, options=options, env=env or {}, side_road=side_road
    ) as made:
        for note in made.notes:
            say(f"note: {note}")
        plan = made.possible(plan)
        planned = plan.disturbances()
        loads = _loads(plan, made)
        running_pid(made.home.supervisor, "ingest", START_S)
        until(lambda: "pipeline-jvm" in made.pids(), "the pipeline starts", START_S)
        director = Director(made, loads, say)
        start = time.monotonic()
        with contextlib.ExitStack() as stack:
            probes = stack.enter_context(Probes(made, loads))
            for load in loads.values():
                stack.enter_context(load)
            director.play(planned, plan.seconds, threading.Event())
            seconds = time.monotonic() - start
            for load in loads.values():
                load.finish()
            say(f"{probes.now_s:6.0f} s  the traffic is over")
            problems += _settle(made, loads)
            say(f"{probes.now_s:6.0f} s  everything is committed")
        codes = made.stop(SETTLE_S)
        problems += [f"{name} ended with {code}" for name, code in codes.items() if code != 0]
        texts = []
        for road, load in loads.items():
            with open_store(made.store_urls[road], create=False) as store:
                counted = read_counted(store)
            books = balance(road, load.sent(), counted)
            texts.append(books.text)
            problems += [f"{road}: {problem}" for problem in books.problems]
            odd = [name for name in load.counts() if name.startswith(("odd", "partial"))]
            problems += [f"{road}: senders got {name}" for name in odd]
            problems += [f"{road}: {problem}" for problem in load_problems(load.counts())]
        problems += plan_problems(planned, director.happened)
        attempts = {"web": probes.pages} | {
            listener: loads[road].attempts for road, listener in RECEIVERS.items() if road in loads
        }
        shares = shares_under_attack(attempts, director.happened)
        pages = Share.of(undisturbed("web", probes.pages, director.happened))
        problems += [
            f"{what}: honest clients that were answered: {share}"
            for what, share in (*shares.items(), ("pages", pages))
            if share.is_bad
        ]
        problems += [f"the process {name} is no victim" for name in sorted(probes.unknown)]
        series = probes.series()
        problems += growth_problems(series, BOUNDS, plan.judged_from_s, seconds)
        return Result(
            plan=plan,
            seconds=seconds,
            balances=texts,
            problems=problems,
            series=series,
            events=director.log,
            missed=director.missed,
            notes=made.notes,
            counts={road: load.counts() for road, load in loads.items()},
            starts={name: service.starts for name, service in made.services.items()},
            pages=pages,
            shares=shares,
            load_average=statistics.median(probes.load_average or [0.0]),
        )


def _loads(plan: Plan, made: Stage) -> dict[str, Load]:
    traffic = plan.traffic
    main = Bodies(plan.seed, traffic.new_names)
    loads = {"main": Load(made.ports, TOKEN, traffic.rate, main, plain=traffic.spans_per_s)}
    if made.postgres is not None:
        # Small requests: enough of them are sent while strangers attack.
        bodies = Bodies(plan.seed + 1, traffic.new_names, in_a_request=30)
        rate = traffic.side_spans_per_s
        loads["side"] = Load(
            made.side_ports, TOKEN, lambda _: rate, bodies, plain=rate, senders=(2, 2)
        )
    return loads


def _settle(made: Stage, loads: Mapping[str, Load]) -> list[str]:
    """Wait until all is acknowledged and committed; what did not happen in time."""
    waits: list[tuple[str, Callable[[], bool]]] = [
        (f"all spans of {road} are acknowledged", load.is_done) for road, load in loads.items()
    ]
    waits += [
        (f"the spool of {road} is read", partial(_is_read, made.homes[road].spool))
        for road in loads
    ]
    deadline = time.monotonic() + SETTLE_S
    problems = []
    for what, done in waits:
        try:
            until(done, what, max(1.0, deadline - time.monotonic()))
        except AssertionError as error:
            problems.append(str(error))
    return problems


def _is_read(spool: Path) -> bool:
    return spool_backlog(spool).count == 0
