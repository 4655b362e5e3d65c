"""How far remote write has come: one small file, so that a restart goes on where it ended."""

from __future__ import annotations

import json
import os
from pathlib import Path

from batchmill.errors import ConfigError


class Position:
    """The last minute that is done with: sent, or refused for good.

    The file belongs to one store and one receiver. It is replaced as a whole, so that a process
    that is killed leaves the old one or the new one.
    """

    def __init__(self, path: Path, store_id: str, url: str) -> None:
        self._path = path
        self._whose = {"store": store_id, "to": url}
        self.minute = self._read()

    def save(self, minute: int) -> None:
        """Note that a minute is done with."""
        new = self._path.with_name(f".{self._path.name}.{os.getpid()}.tmp")
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with new.open("w") as file:
            file.write(json.dumps({**self._whose, "minute": minute}))
            file.flush()
            os.fsync(file.fileno())  # else a power cut may leave an empty file under the name
        new.replace(self._path)
        self.minute = minute

    def _read(self) -> int | None:
        try:
            found = json.loads(self._path.read_text())
            minute = int(found["minute"])
            whose = {name: found[name] for name in self._whose}
        except FileNotFoundError:
            return None
        except (ValueError, LookupError, TypeError) as error:
            raise ConfigError(
                "position", str(self._path), f"a file that remote write made ({error!r}): remove it"
            ) from error
        if whose != self._whose:
            raise ConfigError(
                "position",
                str(self._path),
                f"of the same store and receiver, and it is of {whose['store']} and {whose['to']}: "
                "name another file, or remove it to begin with the newest minute",
            )
        return minute
