"""What spans mean for metrics, so that kept spans are found by the names that metrics have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from batchmill.spans import backends_of, calls_to, names_of_endpoint, normalise_name
from batchmill.traces import SpanMeaning, TraceSpan


class MetricNames(SpanMeaning):
    """The names of endpoints and of what is called, as a pipeline makes them of spans."""

    def __init__(self, *, normalise: bool = True) -> None:
        """``normalise``: whether the pipeline takes ids out of names."""
        self._normalise = normalise

    def endpoint(self, name: str, *, has_route: bool) -> str:
        """The endpoint of a span with that name."""
        return normalise_name(name) if self._normalise and not has_route else name

    def names_of_endpoint(self, names: Any, endpoint: str) -> Sequence[bool]:
        """Which other names are that endpoint, of spans without a route."""
        return names_of_endpoint(names, endpoint) if self._normalise else [False] * len(names)

    def calls_to(self, spans: Any, place: str) -> Any:
        """Which spans call a place, or process a message of it."""
        return calls_to(spans, place)

    def backends(self, spans: Sequence[TraceSpan]) -> Sequence[tuple[str, str] | None]:
        """Of each span the database, cache, broker or model provider that it uses.

        Its name and its layer; None without one.
        """
        return backends_of([(span.kind, span.name, span.attributes) for span in spans])
