"""Receivers of notifications: webhooks, and Alertmanagers; what is sent to each, and how.

A webhook gets the body that Alertmanager sends to webhooks (version 4), so whatever understands
that one understands ours. An Alertmanager gets alerts as Prometheus sends them.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from urllib.parse import unquote, urlsplit

from batchmill import __version__
from batchmill.alerts.evaluation import Message, Occasion
from batchmill.errors import ConfigError
from batchmill.export import HttpAnswer, HttpClient, check_headers
from batchmill.store import StoredAlert

ALLOWED = (
    "http://host:port/path or https://… for a webhook, alertmanager+http://host:port or "
    "alertmanager+https://… for an Alertmanager"
)
_ALERTMANAGER = "alertmanager+"
_API = "/api/v2/alerts"
_PORTS = {"http": 80, "https": 443}
_MAX_ANSWER_BYTES = 1000


@dataclass(frozen=True, slots=True)
class Receiver:
    """Where notifications are sent to."""

    key: str
    """What its notifications are kept under, and what is shown: no login, no query."""
    host: str
    port: int
    path: str
    tls: bool
    is_alertmanager: bool
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def parse(cls, url: str, headers: Mapping[str, str] | None = None) -> Receiver:
        """Read an address; raises :class:`ConfigError`."""
        is_alertmanager = url.startswith(_ALERTMANAGER)
        parts = urlsplit(url.removeprefix(_ALERTMANAGER))
        try:
            port = parts.port or _PORTS.get(parts.scheme, 0)
        except ValueError:
            port = 0
        if parts.scheme not in _PORTS or not parts.hostname or not port or parts.fragment:
            raise ConfigError("alerts_to", _without_secrets(url), ALLOWED)
        sent = {
            "Content-Type": "application/json",
            "User-Agent": f"batchmill/{__version__}",
            **(headers or {}),
        }
        if parts.username is not None:
            login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            sent["Authorization"] = "Basic " + base64.b64encode(login.encode()).decode()
        check_headers(sent)
        path = parts.path or "/"
        if is_alertmanager:
            path = parts.path.rstrip("/")
            path = path if path.endswith(_API) else path + _API
        if parts.query:
            path += f"?{parts.query}"
        key = _without_secrets(url)
        if parts.query:  # two of them may differ by that alone
            key += f"#{hashlib.sha256(url.encode()).hexdigest()[:8]}"
        return cls(key, parts.hostname, port, path, parts.scheme == "https", is_alertmanager, sent)

    def connect(self, timeout_s: float) -> HttpClient:
        """A connection to it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return HttpClient(
            f"{host}:{self.port}",
            path=self.path,
            headers=self.headers,
            tls=self.tls,
            timeout_s=timeout_s,
            max_answer_bytes=_MAX_ANSWER_BYTES,
        )

    def body(self, contents: Sequence[Mapping[str, Any]], active_until_s: float) -> bytes:
        """A request with some notifications; those that fire do so until ``active_until_s``.

        An Alertmanager takes an alert for resolved once that is over, unless it is sent again.
        """
        if self.is_alertmanager:
            return json.dumps([_posted(content, active_until_s) for content in contents]).encode()
        return json.dumps(_webhook(contents)).encode()


def _without_secrets(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def content_of(message: Message) -> dict[str, Any]:
    """A notification as it is stored until it is sent."""
    alert = message.alert
    resolved = message.occasion is Occasion.RESOLVED
    annotations = {"summary": alert.message}
    if alert.value is not None:
        annotations["value"] = f"{alert.value:.10g}"
    return {
        "status": "resolved" if resolved else "firing",
        "labels": dict(alert.labels),
        "annotations": annotations,
        "startsAt": moment(alert.since_s),
        "endsAt": moment(message.ends_s) if message.ends_s is not None else None,
    }


def firing_content(alert: StoredAlert) -> dict[str, Any]:
    """The content of an alert that fires, for a receiver that has to hear it again and again."""
    return content_of(Message(Occasion.FIRING, alert))


def moment(seconds: float) -> str:
    """A time as RFC 3339 has it.

    >>> moment(1_709_208_000)
    '2024-02-29T12:00:00Z'
    """
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _posted(content: Mapping[str, Any], active_until_s: float) -> dict[str, Any]:
    return {
        "labels": content["labels"],
        "annotations": content["annotations"],
        "startsAt": content["startsAt"],
        "endsAt": content["endsAt"] or moment(active_until_s),
    }


def _webhook(contents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    name = str(contents[0]["labels"]["alertname"])
    firing = any(content["status"] == "firing" for content in contents)
    return {
        "version": "4",
        "groupKey": f'{{}}:{{alertname="{name}"}}',
        "truncatedAlerts": 0,
        "status": "firing" if firing else "resolved",
        "receiver": "batchmill",
        "groupLabels": {"alertname": name},
        "commonLabels": _common([content["labels"] for content in contents]),
        "commonAnnotations": _common([content["annotations"] for content in contents]),
        "externalURL": "",
        "alerts": [
            {
                **content,
                "endsAt": content["endsAt"] or "0001-01-01T00:00:00Z",
                "generatorURL": "",
                "fingerprint": fingerprint(content["labels"]),
            }
            for content in contents
        ],
    }


def _common(texts: Sequence[Mapping[str, str]]) -> dict[str, str]:
    first, *others = texts
    return {
        key: value
        for key, value in first.items()
        if all(other.get(key) == value for other in others)
    }


def fingerprint(labels: Mapping[str, str]) -> str:
    """The identity of an alert, by its labels alone."""
    text = json.dumps(sorted(labels.items()), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Delivery:
    """The outcome of a request to a receiver."""

    taken: bool
    answer: str
    """``HTTP 200``, ``unreachable``, ``timed out``: what it is counted as."""
    text: str = ""
    refused: bool = False
    """For good: sending it again would not help."""
    retry_after_s: float | None = None


def deliver(client: HttpClient, body: bytes) -> Delivery:
    """Send a request; never raises for what the receiver or the network does."""
    try:
        answer = client.post(body)
    except TimeoutError as error:
        return Delivery(False, "timed out", str(error))
    except OSError as error:
        return Delivery(False, "unreachable", f"{type(error).__name__}: {error}")
    return _meaning(answer)


def _meaning(answer: HttpAnswer) -> Delivery:
    name = f"HTTP {answer.status}"
    if 200 <= answer.status < 300:
        return Delivery(True, name)
    later = answer.status in (408, 429) or answer.status >= 500
    return Delivery(False, name, answer.text, refused=not later, retry_after_s=answer.retry_after_s)
