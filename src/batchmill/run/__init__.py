"""A run: its settings, its supervised processes, their state on disk, and how it is shown.

Gives settings (:func:`load_settings`), the run itself (:func:`run_processes`), its status
(:func:`read_status`, :class:`StatusReader`, :func:`show_run`) and what its processes need: the home
folder, the status file, signals. Names load on first use, so that a process of a run does not load
what it takes to show one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchmill.extras import lazy_names
from batchmill.run.home import Home, HomeError, HomeInUseError, HomeSourceError
from batchmill.run.settings import (
    FILE,
    HIDDEN,
    OTHER_VARIABLES,
    PREFIX,
    SETTINGS,
    ConfigFileError,
    RunSettings,
    SettingValue,
    UnknownSettingError,
    load_settings,
    resolve,
)
from batchmill.run.signals import Signals, serve_until_signal
from batchmill.run.specs import (
    ALERTS_HEADERS_VARIABLE,
    ALERTS_TO_VARIABLE,
    EXPORT_HEADERS_VARIABLE,
    EXPORT_TOKEN_VARIABLE,
    TOKEN_VARIABLE,
    pipeline_spec,
)
from batchmill.run.supervisor import GaveUpError

if TYPE_CHECKING:
    from batchmill.run.balance import read_counted
    from batchmill.run.checks import check_settings
    from batchmill.run.receivers import Receivers, WorkerError
    from batchmill.run.runner import Demo, run_processes
    from batchmill.run.state import Backlog, RunState, StatusFile, spool_backlog
    from batchmill.run.status import LAG_S, Health, RunStatus, StatusReader, assess, read_status
    from batchmill.run.top.view import show_run

__all__ = [
    "ALERTS_HEADERS_VARIABLE",
    "ALERTS_TO_VARIABLE",
    "EXPORT_HEADERS_VARIABLE",
    "EXPORT_TOKEN_VARIABLE",
    "FILE",
    "HIDDEN",
    "LAG_S",
    "OTHER_VARIABLES",
    "PREFIX",
    "SETTINGS",
    "TOKEN_VARIABLE",
    "Backlog",
    "ConfigFileError",
    "Demo",
    "GaveUpError",
    "Health",
    "Home",
    "HomeError",
    "HomeInUseError",
    "HomeSourceError",
    "Receivers",
    "RunSettings",
    "RunState",
    "RunStatus",
    "SettingValue",
    "Signals",
    "StatusFile",
    "StatusReader",
    "UnknownSettingError",
    "WorkerError",
    "assess",
    "check_settings",
    "load_settings",
    "pipeline_spec",
    "read_counted",
    "read_status",
    "resolve",
    "run_processes",
    "serve_until_signal",
    "show_run",
    "spool_backlog",
]

_MODULES = {
    "balance": "read_counted",
    "checks": "check_settings",
    "receivers": "Receivers WorkerError",
    "runner": "Demo run_processes",
    "state": "Backlog RunState StatusFile spool_backlog",
    "status": "LAG_S Health RunStatus StatusReader assess read_status",
    "top.view": "show_run",
}

__getattr__ = lazy_names(__name__, _MODULES, feature="a run's display", extra="cli")
