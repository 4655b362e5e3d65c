"""``batchmill query``: prints values, metrics and slow calls of a store."""

from __future__ import annotations

import argparse
import re
import sys
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from batchmill.cli.options import OTHER_RUN, Options, add_home_options, home_of, whole
from batchmill.errors import BatchmillError, ConfigError
from batchmill.sources import Grain, UnknownNameError, bucket_start
from batchmill.store import CoveredTime, Store, StoreMissingError, open_store

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]
    Moment = int | datetime

TABLE_ROWS = 100
"""How many values a table shows by default: the newest."""
CHART_VALUES = 50_000
"""How many values a chart has by default: the newest."""
CALENDAR = "a time that the calendar has, in UTC, from the year 1000 on"

_RELATIVE = re.compile(r"-(\d+)([mhd])")
_UNITS = {"m": "minutes", "h": "hours", "d": "days"}
_BUCKET = re.compile(r"\d{8}(\d\d(\d\d)?)?")
_DATE = re.compile(r"(\d{4})-(\d\d)-(\d\d)")


def add_parser(subparsers: Subparsers) -> None:
    """Add the command to the ``batchmill`` parser."""
    parser = subparsers.add_parser(
        "query",
        help="look at the metrics in a store",
        description="Show the values of a metric, the metrics there are (--list), or the slowest "
        "calls (--top). Times are in UTC.",
    )
    # argparse takes -1h for an option; with this it is a value, like a negative number.
    parser._negative_number_matcher = re.compile(r"^-\d+[mhd]?$")
    parser.add_argument("metric", nargs="?", help="the metric's name")
    add = Options(parser)
    text = "sqlite:///path.db, sqlite:////absolute/path.db or postgresql://user@host/database"
    add.value("--store", "URL", f"{text} (default: that of --home)")
    add_home_options(parser)
    add.switch("--list", "list the metrics")
    add.value("--top", "STREAM", "show the slowest calls of a TopN stream")
    add.value("--entity", "ENTITY", "only this entity: its id or its name")
    add.value("--layer", "LAYER", "only entities of this layer")
    text = "a time (2024-03-01T12:00), a bucket (202403011200), or -1h: before the newest bucket"
    add.value("--from", "TIME", f"the first: {text}", dest="start")
    add.value("--to", "TIME", "the last, likewise", dest="end")
    parser.add_argument(
        "--grain",
        choices=[grain.value for grain in Grain],
        default=Grain.MINUTE.value,
        help="how long a bucket is (default: %(default)s)",
    )
    defaults = f"all as JSON, {TABLE_ROWS} in a table, {CHART_VALUES} in a chart"
    text = f"the most values, the newest (default: {defaults}); with --top: records for each entity"
    add.value("--limit", "N", f"{text} and bucket", type=whole())
    shown = Options(parser.add_mutually_exclusive_group())
    shown.switch("--json", "one JSON object a line")
    shown.switch("--chart", "a line of blocks for each entity")


def run(arguments: argparse.Namespace) -> int:
    """Answer a query; the exit code, 2 if it names something that does not exist."""
    if sum(map(bool, (arguments.metric, arguments.list, arguments.top))) != 1:
        return _fail("name a metric, or use --list or --top STREAM: one of them", 2)
    try:
        with open_store(arguments.store or home_of(arguments).store_url, create=False) as store:
            return _answer(store, arguments)
    except (ConfigError, UnknownNameError) as error:
        return _fail(str(error), 2)
    except StoreMissingError as error:
        return _fail(f"{error}{'' if arguments.store else OTHER_RUN}", 1)
    except BatchmillError as error:
        return _fail(str(error), 1)


def _answer(store: Store, arguments: argparse.Namespace) -> int:
    from batchmill.cli import query_view as view  # needs rich

    if arguments.list:
        metrics = store.metrics()
        if not metrics:
            return _nothing("the store has no metrics yet: run the pipeline first")
        view.show_metrics(metrics, as_json=arguments.json)
        return 0
    grain = Grain(arguments.grain)
    newest = store.newest_minute()
    start = _moment("--from", arguments.start, newest)
    end = _moment("--to", arguments.end, newest)
    if arguments.top:
        streams = store.top_streams()
        if streams and arguments.top not in streams:
            raise UnknownNameError("TopN stream", arguments.top, tuple(streams))
        records = store.top(
            arguments.top,
            entity=arguments.entity,
            grain=grain,
            bucket=(start, end),
            n=arguments.limit,
        )
        if not records:
            return _nothing(f"no records of {arguments.top} {_where(arguments)}")
        view.show_records(records, as_json=arguments.json)
        return 0
    return _show_values(store, view, arguments, newest, start, end)


def _show_values(
    store: Store,
    view: Any,
    arguments: argparse.Namespace,
    newest: int | None,
    start: Moment | None,
    end: Moment | None,
) -> int:
    selection: dict[str, Any] = {
        "entity": arguments.entity,
        "grain": Grain(arguments.grain),
        "start": start,
        "end": end,
        "layer": arguments.layer,
        "covered": True,
    }
    limit = _limit(arguments)
    complete_s = CoveredTime.of_minutes(None, newest).complete_s(time.time())
    if limit is None:  # never more than a page of them in memory
        shown = view.show_json(store.iter_values(arguments.metric, **selection), complete_s)
    else:
        values = store.values(arguments.metric, **selection, limit=limit)
        shown = len(values)
        if arguments.json:
            view.show_json(values, complete_s)
        elif values:
            total = store.count_values(arguments.metric, **selection) if shown == limit else shown
            stored = [m for m in store.metrics(include_retired=True) if m.name == arguments.metric]
            metric = max(stored, key=lambda known: (known.active, known.version))
            show = view.show_chart if arguments.chart else view.show_table
            show(values, metric, left_out=max(0, total - shown), complete_s=complete_s)
    if not shown:
        return _nothing(f"no values of {arguments.metric} {_where(arguments, newest)}")
    return 0


def _limit(arguments: argparse.Namespace) -> int | None:
    """The most values to read; None: all, one after the other."""
    if arguments.limit is not None:
        return int(arguments.limit)
    if arguments.json:
        return None
    return CHART_VALUES if arguments.chart else TABLE_ROWS


def _moment(option: str, text: str | None, newest: int | None) -> Moment | None:
    """The bucket or moment in a text."""
    if text is None:
        return None
    try:
        if relative := _RELATIVE.fullmatch(text):
            back = timedelta(**{_UNITS[relative[2]]: int(relative[1])})
            return None if newest is None else bucket_start(newest) - back
        # A date is a whole day, from its first minute to its last.
        bucket = "".join(day.groups()) if (day := _DATE.fullmatch(text)) else text
        if _BUCKET.fullmatch(bucket):
            bucket_start(int(bucket))  # raises if the calendar has no such moment
            return int(bucket)
        moment = datetime.fromisoformat(text)
        return moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)
    except (ConfigError, OverflowError):
        raise ConfigError(option, text, CALENDAR) from None
    except ValueError:
        allowed = "a time like 2024-03-01T12:00, a bucket like 202403011200, or -30m, -1h, -7d"
        raise ConfigError(option, text, allowed) from None


def _where(arguments: argparse.Namespace, newest: int | None = None) -> str:
    options = (
        ("for entity", arguments.entity),
        ("in layer", arguments.layer),
        ("from", arguments.start),
        ("to", arguments.end),
    )
    words = [f"{word} {value}" for word, value in options if value]
    hint = f"; the newest minute in the store is {newest}" if newest is not None else ""
    return " ".join([f"by {arguments.grain}", *words]) + hint


def _nothing(message: str) -> int:
    print(message, file=sys.stderr)
    return 0


def _fail(message: str, code: int) -> int:
    print(f"batchmill query: {message}", file=sys.stderr)
    return code
