"""To look at: a JSON API over a store, the endpoints that Grafana reads, and the pages.

Loads without its extra, so that it can say which one is missing.
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

_MODULES = {
    "WebServer": "server",
    "WebSettings": "server",
    "make_app": "app",
}

__getattr__ = lazy_names(__name__, _MODULES, feature="the web server", extra="web")
