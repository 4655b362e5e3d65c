"""The client that an application embeds: its own events to a spool, or as deltas to a topic.

:class:`Client` turns events into rows. With ``aggregate=`` an :mod:`.edge` turns rows into deltas
before they are written; :class:`EdgeSettings` says how long it gathers them.
"""

from batchmill.client.client import Client, ClientStats, row_for
from batchmill.client.settings import EdgeSettings

__all__ = ["Client", "ClientStats", "EdgeSettings", "row_for"]
