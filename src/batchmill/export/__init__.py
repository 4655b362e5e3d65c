"""Exporters: what each commit changed, sent to others.

An exporter tails the outbox of a pipeline (see :mod:`batchmill.outbox`), in a process of its own:
a peer that is slow or dead holds up nobody but the exporter.

Loads without its extra, so that it can say which one is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchmill._lazy import lazy_names
from batchmill.export._errors import ExporterInUseError, MissingExportError, SendError
from batchmill.export._forget import forget_exporter
from batchmill.export._settings import ExporterSettings
from batchmill.export._target import Sender, Target, open_sender
from batchmill.export._values import ExportedValue

if TYPE_CHECKING:
    from batchmill.export._exporter import Exporter
    from batchmill.export._figures import ExporterStats
    from batchmill.export._forward import KafkaForwarder
    from batchmill.export._minutes import complete_minute
    from batchmill.export._otlp import to_otlp
    from batchmill.export._prometheus_page import PageSettings, StoreUnreadableError
    from batchmill.export._prometheus_server import PrometheusServer, PrometheusSettings
    from batchmill.export._remote_write import RemoteWriter
    from batchmill.export._remote_write_http import remote_address
    from batchmill.export._remote_write_stats import RemoteWriteSettings, RemoteWriteStats
    from batchmill.export._series import (
        SeriesLimits,
        by_label,
        entity_labels,
        help_text,
        series_names,
    )

__all__ = [
    "ExportedValue",
    "Exporter",
    "ExporterInUseError",
    "ExporterSettings",
    "ExporterStats",
    "KafkaForwarder",
    "MissingExportError",
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
    "Exporter": "_exporter",
    "ExporterStats": "_figures",
    "KafkaForwarder": "_forward",
    "PageSettings": "_prometheus_page",
    "PrometheusServer": "_prometheus_server",
    "PrometheusSettings": "_prometheus_server",
    "RemoteWriteSettings": "_remote_write_stats",
    "RemoteWriteStats": "_remote_write_stats",
    "RemoteWriter": "_remote_write",
    "SeriesLimits": "_series",
    "StoreUnreadableError": "_prometheus_page",
    "by_label": "_series",
    "complete_minute": "_minutes",
    "entity_labels": "_series",
    "help_text": "_series",
    "remote_address": "_remote_write_http",
    "series_names": "_series",
    "to_otlp": "_otlp",
}

__getattr__ = lazy_names(__name__, _MODULES, MissingExportError)
