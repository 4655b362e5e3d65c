"""``batchmill alerts``: checks rules, lists alerts, and evaluates rules on a store."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from batchmill.alerts import (
    AlertEngine,
    AlertSettings,
    BurnRate,
    Receiver,
    RuleFile,
    RuleWatcher,
    load_rules,
)
from batchmill.cli.export import await_pipeline
from batchmill.cli.options import (
    Options,
    add_home_options,
    add_metrics_options,
    add_sources_option,
    home_of,
    import_sources,
    metrics_page,
    number,
    only_given,
)
from batchmill.errors import ConfigError
from batchmill.logs import configure_logs
from batchmill.oal import core_script, load
from batchmill.process_stats import ProcessStats
from batchmill.run import (
    ALERTS_HEADERS_VARIABLE,
    ALERTS_TO_VARIABLE,
    Signals,
    StatusFile,
)
from batchmill.store import AlertPhase, Store, open_store
from batchmill.wording import count_of

if TYPE_CHECKING:
    from batchmill.oal import MetricSet

STATUS_S = 1.0
SHOWN_FIRING = 20
"""How many alerts a report lists."""
HISTORY = 50


def add_parser(commands: Any) -> None:
    """Add the command."""
    alerts = commands.add_parser("alerts", help="check alert rules, list alerts, evaluate rules")
    actions = alerts.add_subparsers(dest="action", required=True, metavar="action")
    _add_check(actions)
    _add_list(actions)
    _add_run(actions)


def _add_check(actions: Any) -> None:
    check = actions.add_parser(
        "check",
        help="print the rules in a file, or everything that is wrong with it",
        description="Print the rules in a file, or everything that is wrong with it. The exit code "
        "is 0 if all of it can be used, 1 if parts of a SkyWalking file are left out, 2 if it "
        "cannot be used.",
    )
    check.add_argument("file", help="a file of rules, TOML or YAML, or an alarm-settings.yml")
    add = Options(check)
    add.values("--oal", "FILE", "scripts whose metrics the rules use (default: the core metrics)")
    add.value("--store", "URL", "a store whose metrics the rules use, instead of scripts")
    add_sources_option(check)


def _add_list(actions: Any) -> None:
    listed = actions.add_parser(
        "list",
        help="print the alerts that fire or are pending, and those that fired",
        description="Print the alerts that fire or are pending, then those that fired before. The "
        "exit code is 0 whether or not any fires. Times are in UTC.",
    )
    add_home_options(listed)
    Options(listed).value("--store", "URL", "a store, instead of that of a run")
    listed.add_argument("--json", action="store_true", help="one JSON object a line")


def _add_run(actions: Any) -> None:
    run = actions.add_parser(
        "run",
        help="evaluate rules on a store and send notifications, until Ctrl-C",
        description="Evaluate rules on every closed minute of a store, and send notifications. "
        "`batchmill run` does so itself if the setting alerts names a file. A file that changes is "
        "read again. State is in the store: a restart neither forgets nor repeats.",
    )
    add = Options(run)
    add.value("--rules", "FILE", "the rules", required=True)
    add.value("--store", "URL", "the store (default: that of --home)")
    add_home_options(run)
    better = f"better in {ALERTS_TO_VARIABLE}, with spaces between them: all users of this machine "
    text = "a webhook, http://… or https://…, or an alertmanager+http://host:port; may be repeated"
    add.values("--to", "URL", f"{text}; {better}see command lines")
    text = f"sent with each request; better in {ALERTS_HEADERS_VARIABLE}, with commas between them"
    add.values("--header", "NAME=VALUE", text)
    text = "a minute is closed when it is over for so long, and a later one committed (default: 15)"
    add.value("--grace", "S", text, type=number(zero=True))
    add.value("--poll", "S", "how often to look for closed minutes (default: 1)", type=number())
    add.value("--timeout", "S", "for an answer (default: 10)", type=number())
    text = "the longest wait between two tries (default: 30)"
    add.value("--retry-max", "S", text, type=number())
    add.value("--status", "FILE", "report there each second how it is doing", type=Path)
    add.switch("--verbose", "log more")
    add_metrics_options(run)


def run(arguments: argparse.Namespace) -> int:
    """Do what the action says; the exit code."""
    return {"check": _check, "list": _list, "run": _run}[arguments.action](arguments)


# Checking.


def _check(arguments: argparse.Namespace) -> int:
    rules = load_rules(arguments.file)
    import_sources(arguments.sources)
    problems = _faults(rules, _metrics(arguments))
    if problems:
        print(*(f"{arguments.file}: {problem}" for problem in problems), sep="\n", file=sys.stderr)
        return 2
    for rule in rules.rules:
        print(f"{rule.id}: {rule.condition.text}; {rule.severity}")
    _print_left_out(rules)
    note = f", {count_of(len(rules.left_out), 'part')} not read" if rules.left_out else ""
    print(f"{arguments.file}: {count_of(len(rules.rules), 'rule')}{note}")
    return 1 if rules.left_out else 0


class _Known(NamedTuple):
    """A metric's source, function and arguments."""

    source: str
    function: str
    args: Sequence[int | None]
    """Of the function; None for those that are no numbers."""


def _metrics(arguments: argparse.Namespace) -> Mapping[str, _Known]:
    """The metrics that rules may use, by name."""
    if arguments.store is not None:
        with open_store(arguments.store, create=False) as store:
            stored = store.metrics()
        return {
            metric.name: _Known(metric.source, metric.function, metric.plan.args)
            for metric in stored
        }
    metrics: MetricSet = load(
        [Path(path) for path in arguments.oal] if arguments.oal else core_script()
    )
    return {
        metric.name: _Known(
            metric.source,
            metric.function,
            [arg if isinstance(arg, int) else None for arg in metric.args],
        )
        for metric in metrics
    }


def _faults(rules: RuleFile, known: Mapping[str, _Known]) -> list[str]:
    """What is wrong with the metrics and labels of rules."""
    problems = []
    for rule in rules.rules:
        names = rule.condition.metrics
        missing = [name for name in names if name not in known]
        if missing:
            word = "metric" if len(missing) == 1 else "metrics"
            problems.append(
                f"rule {rule.id!r}: there is no {word} {', '.join(missing)}; `batchmill oal check` "
                "and `batchmill query --list` show those there are"
            )
            continue
        sources = sorted({known[name].source for name in names})
        if len(sources) > 1:
            problems.append(
                f"rule {rule.id!r}: its metrics are of different sources ({', '.join(sources)}): a "
                "rule needs metrics of one"
            )
        if isinstance(rule.condition, BurnRate):
            function = known[names[0]].function
            if function != "percent":
                problems.append(
                    f"rule {rule.id!r}: {names[0]} is {function}(), and an SLO needs percent()"
                )
            continue
        functions = {name: (known[name].function, known[name].args) for name in names}
        faults = rule.condition.label_faults(functions)
        problems += [f"rule {rule.id!r}: {fault}" for fault in faults]
    return problems


# Listing.


def _list(arguments: argparse.Namespace) -> int:
    url = arguments.store or home_of(arguments).store_url
    with open_store(url, create=False) as store:
        book = store.alerts()
        now_s = int(datetime.now(UTC).timestamp())
        history = [
            episode
            for episode in store.alert_episodes(0, now_s + 86_400, limit=HISTORY)
            if episode.ends_s is not None
        ]
    alerts = sorted(
        (alert for alert in book.alerts if alert.phase is not AlertPhase.SILENT),
        key=lambda alert: (alert.phase is AlertPhase.PENDING, -alert.since_s, alert.rule),
    )
    if arguments.json:
        for alert in alerts:
            _print_json({**asdict(alert), "phase": alert.phase.value})
        for episode in history:
            _print_json({**asdict(episode), "phase": "resolved"})
        return 0
    rows = [
        (
            *(alert.phase.value, alert.labels.get("severity", ""), alert.rule, alert.entity_name),
            *(_moment(alert.since_s), ""),
            alert.message or f"{alert.value:.6g}" if alert.value is not None else alert.message,
        )
        for alert in alerts
    ]
    rows += [
        (
            *("resolved", episode.severity, episode.rule, episode.entity_name),
            *(_moment(episode.starts_s), _moment(episode.ends_s or 0), episode.message),
        )
        for episode in history
    ]
    if rows:
        _print_table(("state", "severity", "rule", "entity", "since", "until", "message"), rows)
    firing = sum(alert.phase is AlertPhase.FIRING for alert in alerts)
    pending = len(alerts) - firing
    print(f"{firing:,} firing, {pending:,} pending; {count_of(len(book.rules), 'rule')}")
    return 0


def _print_json(content: Mapping[str, Any]) -> None:
    print(json.dumps(content, ensure_ascii=False))


def _moment(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")


def _print_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Columns as wide as their longest cell, whatever the terminal."""
    table = [head, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(head))]
    for row in table:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())


# Running.


def _run(arguments: argparse.Namespace) -> int:
    configure_logs(verbose=arguments.verbose)
    url = arguments.store or home_of(arguments).store_url
    watcher = RuleWatcher(arguments.rules)
    receivers = _receivers(arguments)
    settings = AlertSettings(
        **only_given(
            grace_s=arguments.grace,
            poll_s=arguments.poll,
            timeout_s=arguments.timeout,
            max_ms=None if arguments.retry_max is None else arguments.retry_max * 1000,
        )
    )
    status = StatusFile(
        arguments.status, "alerts", rules_file=str(Path(arguments.rules).absolute())
    )
    _print_left_out(watcher.file)
    with Signals() as signals, metrics_page(arguments):
        store = await_pipeline(lambda: open_store(url, create=False), status, signals)
        if store is None:
            return 0
        with store:
            _follow(store, watcher, receivers, settings, status, signals)
    return 0


def _receivers(arguments: argparse.Namespace) -> list[Receiver]:
    headers: dict[str, str] = {}
    for text in [*os.environ.get(ALERTS_HEADERS_VARIABLE, "").split(","), *arguments.header]:
        name, equals, value = text.partition("=")
        if text and not (name.strip() and equals):
            raise ConfigError("header", "…", "NAME=VALUE")
        if text:
            headers[name.strip()] = value.strip()
    urls = [*os.environ.get(ALERTS_TO_VARIABLE, "").split(), *arguments.to]
    return [Receiver.parse(url, headers) for url in dict.fromkeys(urls)]


def _follow(
    store: Store,
    watcher: RuleWatcher,
    receivers: Sequence[Receiver],
    settings: AlertSettings,
    status: StatusFile,
    signals: Signals,
) -> None:
    process = ProcessStats()
    rules = watcher.file
    with AlertEngine(store, rules.rules, receivers, settings) as engine:
        engine.start()
        to = ", ".join(receiver.key for receiver in receivers) or "nobody: set alerts_to"
        print(
            f"{count_of(len(rules.rules), 'rule')} of {rules.path}; notifying {to}; Ctrl-C ends it",
            flush=True,
        )
        while not signals.count:
            if watcher.poll(engine) and watcher.file is not rules:
                rules = watcher.file
                print(f"read again: {count_of(len(rules.rules), 'rule')}", flush=True)
                _print_left_out(rules)
            status.write({**report(engine, rules), **process.report(), "state": "running"})
            signals.wait(STATUS_S)
    status.write({**report(engine, rules), "state": "ended"})
    print("ended: the next run continues from here", flush=True)


def _print_left_out(rules: RuleFile) -> None:
    for text in rules.left_out:
        print(f"not read: {text}", file=sys.stderr, flush=True)


def report(engine: AlertEngine, rules: RuleFile) -> dict[str, Any]:
    """What the process reports of itself each second."""
    stats = engine.stats()
    firing = engine.firing()
    return {
        **asdict(stats),
        "failing_s": round(stats.failing_s, 1),
        "lag_s": round(stats.lag_s, 1),
        "left_out": list(rules.left_out),
        "next_due_s": engine.next_due_s(),
        "alerts": [
            {
                "rule": alert.rule,
                "entity_id": alert.entity_id,
                "entity_name": alert.entity_name,
                "since_s": alert.since_s,
                "message": alert.message,
            }
            for alert in firing[:SHOWN_FIRING]
        ],
    }
