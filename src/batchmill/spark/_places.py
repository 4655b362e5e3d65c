"""What parts of a pipeline may be called, and where they may lie."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from batchmill._errors import ConfigError

if TYPE_CHECKING:
    from batchmill.kafka import KafkaAddress


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


def kafka_topic(address: str) -> KafkaAddress:
    """The topic that an address names; an error that says what to install if that is missing."""
    from batchmill.kafka import KafkaAddress

    return KafkaAddress.parse(address)
