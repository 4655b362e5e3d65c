"""Exporters: what each commit changed, sent to others.

An exporter tails the outbox of a pipeline (see :mod:`batchmill.outbox`), in a process of its own:
a peer that is slow or dead holds up nobody but the exporter.

Loads without its extra, so that it can say which one is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchmill.export.errors import ExporterInUseError, SendError, StoreUnreadableError
from batchmill.export.forget import forget_exporter
from batchmill.export.settings import ExporterSettings
from batchmill.export.target import Sender, Target, open_sender
from batchmill.export.values import ExportedValue
from batchmill.extras import lazy_names

if TYPE_CHECKING:
    from batchmill.export.exporter import Exporter
    from batchmill.export.figures import ExporterStats
    from batchmill.export.forward import KafkaForwarder
    from batchmill.export.prometheus.page import PageSettings
    from batchmill.export.prometheus.series import (
        SeriesLimits,
        by_label,
        complete_minute,
        entity_labels,
        help_text,
        series_names,
    )
    from batchmill.export.prometheus.server import PrometheusServer, PrometheusSettings
    from batchmill.export.remote_write.http import remote_address
    from batchmill.export.remote_write.stats import RemoteWriteSettings, RemoteWriteStats
    from batchmill.export.remote_write.writer import RemoteWriter
    from batchmill.export.senders.otlp import to_otlp

__all__ = [
    "ExportedValue",
    "Exporter",
    "ExporterInUseError",
    "ExporterSettings",
    "ExporterStats",
    "KafkaForwarder",
    "PageSettings",
    "PrometheusServer",
    "PrometheusSettings",
    "RemoteWriteSettings",
    "RemoteWriteStats",
    "RemoteWriter",
    "SendError",
    "Sender",
    "SeriesLimits",
    "StoreUnreadableError",
    "Target",
    "by_label",
    "complete_minute",
    "entity_labels",
    "help_text",
    "forget_exporter",
    "open_sender",
    "remote_address",
    "series_names",
    "to_otlp",
]

_MODULES = {
    "Exporter": "exporter",
    "ExporterStats": "figures",
    "KafkaForwarder": "forward",
    "PageSettings": "prometheus.page",
    "PrometheusServer": "prometheus.server",
    "PrometheusSettings": "prometheus.server",
    "RemoteWriteSettings": "remote_write.stats",
    "RemoteWriteStats": "remote_write.stats",
    "RemoteWriter": "remote_write.writer",
    "SeriesLimits": "prometheus.series",
    "by_label": "prometheus.series",
    "complete_minute": "prometheus.series",
    "entity_labels": "prometheus.series",
    "help_text": "prometheus.series",
    "remote_address": "remote_write.http",
    "series_names": "prometheus.series",
    "to_otlp": "senders.otlp",
}

__getattr__ = lazy_names(__name__, _MODULES, feature="exporting", extra="export")
