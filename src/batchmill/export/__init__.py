"""Exporters: send what each commit changed, or each complete minute, to other systems.

:class:`Exporter` tails the outbox of a pipeline (see :mod:`batchmill.outbox`) and sends to an
OpenTelemetry collector or a Kafka topic; :class:`PrometheusServer` and :class:`RemoteWriter` give
minutes of the store to Prometheus; :class:`KafkaForwarder` hands on what ingest receives. Each is a
process or threads of its own: a peer that is slow or dead holds up nobody else.

Loads without its extra, so that it can say which one is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchmill.export.settings import (
    PROMETHEUS_ADDRESSES,
    ExporterSettings,
    Target,
    check_address,
    is_scraped,
    page_address,
    reads_store,
    require_exporter,
)
from batchmill.extras import lazy_names

if TYPE_CHECKING:
    from batchmill.export.exporter import Exporter, ExporterInUseError, forget_exporter
    from batchmill.export.forwarder import KafkaForwarder
    from batchmill.export.http import HttpAnswer, HttpClient, check_headers
    from batchmill.export.prometheus.page import PageSettings, StoreUnreadableError
    from batchmill.export.prometheus.series import (
        SeriesLimits,
        by_label,
        complete_minute,
        entity_labels,
        help_text,
        series_names,
    )
    from batchmill.export.prometheus.server import (
        PrometheusServer,
        PrometheusSettings,
        TelemetryServer,
    )
    from batchmill.export.remote_write.client import remote_address
    from batchmill.export.remote_write.stats import RemoteWriteSettings, RemoteWriteStats
    from batchmill.export.remote_write.writer import RemoteWriter
    from batchmill.export.senders import Sender, SendError, open_sender
    from batchmill.export.senders.otlp import to_otlp
    from batchmill.export.stats import ExporterStats
    from batchmill.export.values import ExportedValue

__all__ = [
    "PROMETHEUS_ADDRESSES",
    "ExportedValue",
    "Exporter",
    "ExporterInUseError",
    "ExporterSettings",
    "ExporterStats",
    "HttpAnswer",
    "HttpClient",
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
    "TelemetryServer",
    "by_label",
    "check_address",
    "check_headers",
    "complete_minute",
    "entity_labels",
    "help_text",
    "forget_exporter",
    "is_scraped",
    "open_sender",
    "page_address",
    "reads_store",
    "remote_address",
    "require_exporter",
    "series_names",
    "to_otlp",
]

_MODULES = {
    "exporter": "Exporter ExporterInUseError forget_exporter",
    "forwarder": "KafkaForwarder",
    "http": "HttpAnswer HttpClient check_headers",
    "prometheus.page": "PageSettings StoreUnreadableError",
    "prometheus.series": "SeriesLimits by_label complete_minute entity_labels help_text"
    " series_names",
    "prometheus.server": "PrometheusServer PrometheusSettings TelemetryServer",
    "remote_write.client": "remote_address",
    "remote_write.stats": "RemoteWriteSettings RemoteWriteStats",
    "remote_write.writer": "RemoteWriter",
    "senders": "SendError Sender open_sender",
    "senders.otlp": "to_otlp",
    "stats": "ExporterStats",
    "values": "ExportedValue",
}

__getattr__ = lazy_names(__name__, _MODULES, feature="exporting", extra="export")
