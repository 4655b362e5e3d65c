"""The web server: a JSON API over a store, Prometheus endpoints for Grafana, and the web UI.

Can be imported without its extra, to say that the extra is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchmill.extras import lazy_names

if TYPE_CHECKING:
    from batchmill.web.app import make_app
    from batchmill.web.server import WebServer, WebSettings

__all__ = [
    "WebServer",
    "WebSettings",
    "make_app",
]

_MODULES = {"app": "make_app", "server": "WebServer WebSettings"}

__getattr__ = lazy_names(__name__, _MODULES, feature="the web server", extra="web")
