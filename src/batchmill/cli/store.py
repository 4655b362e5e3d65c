"""``batchmill store repair``: removes what a wrong clock has written to a store."""

from __future__ import annotations

import argparse
import time
from datetime import UTC, datetime
from typing import Any

from batchmill.cli.options import Options, add_home_options, home_of
from batchmill.errors import ConfigError
from batchmill.sources import bucket_start
from batchmill.store import ClockRepair, moment_of, open_store
from batchmill.wording import count_of


def add_parser(commands: Any) -> None:
    """Add the command."""
    store = commands.add_parser("store", help="look after a store")
    actions = store.add_subparsers(dest="action", required=True, metavar="action")
    repair = actions.add_parser(
        "repair",
        help="remove what a clock that was ahead has written to a store",
        description="Show which data in a store is from the future, and which time expiry counts "
        "from. With --apply, remove that data and set that time from the clock of this machine: "
        "check the clock first. A pipeline may run meanwhile.",
    )
    add = Options(repair)
    add.value("--store", "URL", "the store (default: that of --home)")
    add_home_options(repair)
    text = "what is later comes from the future: 2026-03-01T12:00, in UTC (default: in an hour)"
    add.value("--after", "TIME", text)
    add.switch("--apply", "remove it; without this nothing is changed")


def run(arguments: argparse.Namespace) -> int:
    """Repair a store, or show what that would do; the exit code."""
    after_s = None if arguments.after is None else _moment(arguments.after).timestamp()
    now_s = time.time()
    with open_store(arguments.store or home_of(arguments).store_url, create=False) as store:
        repair = store.repair_clock(now_s, after_s=after_s, apply=arguments.apply)
    print(*_lines(repair, now_s), sep="\n")
    return 0


def _lines(repair: ClockRepair, now_s: float) -> list[str]:
    before = repair.before
    trusted = "no time yet" if before.trusted_s is None else moment_of(before.trusted_s)
    lines = [
        f"clock      {moment_of(now_s)}",
        f"trusted    {trusted}: expiry counts from no later time",
        f"newest     {_minute(repair.newest_before)}",
    ]
    if repair.first is not None:
        rows = ", ".join(f"{count:,} by {grain.value}" for grain, count in repair.rows.items())
        lines.append(
            f"future     {count_of(sum(repair.rows.values()), 'row')} ({rows}), "
            f"from {_minute(repair.first)} to {_minute(repair.last)}"
        )
        if _shares_bucket(repair):
            lines.append(
                f"           the hour and the day of {_minute(repair.newest)} may keep what the "
                "removed minutes have added to them"
            )
    else:
        lines.append("future     no rows")
    changes = repair.first is not None or bool(before.doubts(now_s))
    if repair.applied:
        lines.append(
            f"repaired: the newest minute is {_minute(repair.newest)}; expiry follows this clock"
        )
    elif changes:
        lines.append("nothing was changed: --apply removes the rows, and trusts this clock")
    else:
        lines.append("nothing to repair")
    return lines


def _shares_bucket(repair: ClockRepair) -> bool:
    """Whether the first removed minute lies on the day of the last that is kept."""
    if repair.first is None or repair.newest is None:
        return False
    return repair.first // 10_000 == repair.newest // 10_000


def _minute(minute: int | None) -> str:
    return "none" if minute is None else moment_of(bucket_start(minute).timestamp())


def _moment(text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError("--after", text, "a time such as 2026-03-01T12:00, in UTC") from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
