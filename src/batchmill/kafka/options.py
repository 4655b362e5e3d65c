"""Settings of librdkafka from the user: reads and checks them, and hides secrets in messages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from batchmill.errors import ConfigError

HIDDEN = "(hidden)"
_OURS = frozenset(
    {
        "acks",
        "batch.size",
        "bootstrap.servers",
        "compression.codec",
        "compression.type",
        "delivery.timeout.ms",
        "enable.auto.commit",
        "enable.idempotence",
        "group.id",
        "linger.ms",
        "message.max.bytes",
        "message.timeout.ms",
        "metadata.broker.list",
        "partitioner",
        "queue.buffering.max.kbytes",
        "queue.buffering.max.messages",
        "queue.buffering.max.ms",
        "request.required.acks",
        "transactional.id",
    }
)
"""Settings that the guarantees rest on, or that have a name of their own here."""
_SECRET = ("password", "secret", "token", "jaas", "oauthbearer.config", "key.pem")


def read_options(path: Path) -> dict[str, str]:
    """Settings of librdkafka from a file: a line ``name=value`` each, ``#`` for comments."""
    options: dict[str, str] = {}
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(str(path), "…", "text in UTF-8") from None
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        name, equals, value = line.partition("=")
        if not equals or not name.strip():
            # Without the line itself: it may be a secret.
            raise ConfigError(f"{path}, line {number}", "…", "name=value, or a comment after #")
        options[name.strip()] = value.strip()
    check_options(options)
    return options


def check_options(options: Mapping[str, str]) -> None:
    """Raise ConfigError for a setting that batchmill controls itself."""
    for name in options:
        if name in _OURS:
            raise ConfigError(f"options[{name!r}]", "…", "left out: batchmill sets it itself")


def hide_secrets(text: str, options: Mapping[str, str]) -> str:
    """A text without the passwords and keys among the options."""
    for name, value in options.items():
        if value and any(word in name for word in _SECRET):
            text = text.replace(value, HIDDEN)
    return text
