"""What parts of a pipeline may be called, and where they may lie."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from batchmill.errors import ConfigError

if TYPE_CHECKING:
    from batchmill.kafka import KafkaAddress

log = logging.getLogger("batchmill.spark")


def folder_stream(folder: Path, name: str | None) -> str:
    """What a folder's backfill is called: it is known by that when it is repeated."""
    return f"backfill-folder-{name or hashlib.sha256(str(folder).encode()).hexdigest()[:12]}"


def checked(name: str) -> str:
    """A name, if it may be one."""
    if not name or not all(each.isalnum() or each in "-_" for each in name):
        raise ConfigError("name", name, "letters, digits, - and _")
    return name


def apart(*folders: Path) -> None:
    """None of the folders may lie in another: each is listed or cleaned as a whole."""
    for one in folders:
        for other in folders:
            if one is not other and (one == other or other in one.parents):
                raise ConfigError("folder", str(one), f"outside {other}")


def checked_options(source: str | None, options: Mapping[str, str]) -> dict[str, str]:
    """Settings of librdkafka, if Kafka's Java client has their like; said is what it has not."""
    if not options:
        return {}
    if source is None:
        raise ConfigError("kafka_options", "…", "left out where there is no topic to read")
    from batchmill.kafka import java_options

    if unused := java_options(options).unused:
        log.warning("not used to read %s, which Spark does: %s", source, ", ".join(unused))
    return dict(options)


def kafka_topic(address: str) -> KafkaAddress:
    """The topic that an address names; an error that says what to install if that is missing."""
    from batchmill.kafka import KafkaAddress

    return KafkaAddress.parse(address)
