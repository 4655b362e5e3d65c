"""The public names: what is promised, no more and no less."""

from __future__ import annotations

from types import ModuleType

import pytest

import batchmill
import batchmill.aggregate
import batchmill.batcher
import batchmill.client
import batchmill.export
import batchmill.flows
import batchmill.kafka
import batchmill.oal
import batchmill.outbox
import batchmill.pressure
import batchmill.queue
import batchmill.sources
import batchmill.spool
import batchmill.store
import batchmill.telemetry
import batchmill.testing
import batchmill.web

QUEUE = {
    "BatchQueue",
    "BatchQueueConfig",
    "BatchQueueSettings",
    "BatchQueueManager",
    "BatchQueueManagerStats",
    "BatchQueueStats",
    "BufferStrategy",
    "DrainBalancer",
    "HandlerConsumer",
    "PartitionMove",
    "PartitionPolicy",
    "PartitionSelector",
    "PartitionStats",
    "QueueErrorHandler",
    "ThreadLoad",
    "ThreadPolicy",
    "default_manager",
    "snapshot_queues",
}
ERRORS = {
    "BatchmillError",
    "ConfigError",
    "HandlerExistsError",
    "MissingExtraError",
    "QueueClosedError",
    "QueueConflictError",
    "QueueExistsError",
    "SelectorError",
    "WouldDeadlockError",
}
PRESSURE = {
    "EventKind",
    "QueueAction",
    "QueueDecision",
    "QueueFullError",
    "QueueThresholdConfig",
    "QueueThresholdSettings",
    "QueueThresholdContext",
    "QueueThresholdEvent",
    "QueueThresholdHandler",
    "QueueThresholdListener",
    "QueueThresholdManager",
    "ThresholdHandler",
    "ThresholdLevel",
    "ThresholdListener",
    "ThresholdStats",
    "snapshot_thresholds",
    "strategies",
}
BATCHER = {
    "AdaptiveConcurrency",
    "Backend",
    "BackendContractError",
    "BatchResult",
    "BatcherClosedError",
    "BatcherConfig",
    "BatcherSettings",
    "BatcherStats",
    "BreakerPolicy",
    "CircuitOpenError",
    "Clock",
    "DeadlineExceededError",
    "DroppedError",
    "FlushReason",
    "ItemResult",
    "MicroBatcher",
    "Outcome",
    "RetryPolicy",
    "SystemClock",
    "WorkerLoad",
    "bisect",
    "snapshot_batchers",
}
FLOWS = {
    "Assignment",
    "Backpressure",
    "BatchmillError",
    "ConfigError",
    "FlowConfig",
    "FlowDispatcher",
    "FlowErrorHandler",
    "FlowHandler",
    "FlowSettings",
    "FlowStats",
    "LatencyStats",
    "LeastLoaded",
    "RoundRobin",
    "ShortestQueue",
    "WorkerStats",
    "WorkerView",
    "WouldDeadlockError",
    "snapshot_flows",
}
SOURCES = {
    "BLANK_NAME",
    "Catalog",
    "ENDPOINT_NAME_LIMIT",
    "ENTITY_KINDS",
    "Entity",
    "EntityIdError",
    "EntityKind",
    "Field",
    "FieldType",
    "Grain",
    "INSTANCE_NAME_LIMIT",
    "Kind",
    "SERVICE_NAME_LIMIT",
    "SPAN_SOURCE",
    "SourceType",
    "TIME_COLUMN",
    "UnknownNameError",
    "bucket_end",
    "bucket_start",
    "builtin_catalog",
    "catalog",
    "day_bucket",
    "endpoint",
    "endpoint_id",
    "endpoint_relation",
    "entity_id",
    "given",
    "hour_bucket",
    "instance",
    "instance_id",
    "instance_relation",
    "is_normal",
    "minute_bucket",
    "row_of",
    "service",
    "service_id",
    "service_relation",
    "source",
    "source_of",
    "split_entity_id",
    "suggest",
}
OAL = {
    "ApdexCount",
    "Arg",
    "Bucketed",
    "Clamped",
    "Condition",
    "Count",
    "Description",
    "DoubleSum",
    "Extreme",
    "FUNCTIONS",
    "Function",
    "Label",
    "LabelSum",
    "MapKey",
    "Metric",
    "MetricSet",
    "OalError",
    "OalErrors",
    "Path",
    "Position",
    "Script",
    "State",
    "Sum",
    "Tally",
    "Value",
    "core_script",
    "describe",
    "double_limbs",
    "exact_double",
    "load",
    "parse",
}
KAFKA = {
    "Behind",
    "DeltaFile",
    "JavaOptions",
    "KafkaLoginError",
    "KafkaReadError",
    "ConnectionErrors",
    "behind",
    "check_options",
    "check_readable",
    "hide_secrets",
    "java_options",
    "KafkaAddress",
    "KafkaAddressError",
    "KafkaSettings",
    "KafkaSink",
    "KafkaStats",
    "KafkaTopicError",
    "KafkaWriteError",
    "Message",
    "MessageTooLargeError",
    "Span",
    "Spans",
    "decode",
    "deltas_in",
    "encode",
    "encode_deltas",
    "read_options",
    "span_rows",
}
SPOOL = {
    "BadRowsError",
    "EventBatch",
    "FOREIGN",
    "Gauge",
    "GaugedSink",
    "Level",
    "Measure",
    "Overloaded",
    "Pressure",
    "SPAN_COLUMNS",
    "SPAN_SCHEMA",
    "SPAN_SOURCE",
    "SinkSettings",
    "SinkStats",
    "SpanBatch",
    "SpanColumn",
    "SpanSink",
    "Spool",
    "SpoolClosedError",
    "SpoolSettings",
    "SpoolStats",
    "SpoolWriteError",
    "Unread",
    "delta_file",
    "event_tables",
    "span_table",
    "table_of",
    "unread",
}
CLIENT = {"Client", "ClientStats", "EdgeSettings", "row_for"}
AGGREGATE = {
    "Aggregator",
    "Contribution",
    "Deltas",
    "DeltasError",
    "EntityBook",
    "Made",
    "ROW_COUNT",
    "SourcePlan",
    "contribution",
    "from_arrow",
    "is_deltas",
    "to_arrow",
}
STORE = {
    "Batch",
    "BatchGapError",
    "BucketList",
    "BucketValues",
    "Buckets",
    "Carry",
    "Cell",
    "CellRows",
    "CheckpointMismatchError",
    "Claim",
    "CommitResult",
    "Deltas",
    "EXPIRED",
    "EntityPage",
    "EntityRow",
    "EntityValues",
    "Exempt",
    "ExportPosition",
    "FencedError",
    "Layout",
    "LayoutChangedError",
    "MetricConflictError",
    "EntityName",
    "NamesClashError",
    "NotAStoreError",
    "OutboxDepth",
    "OutboxFile",
    "Outgoing",
    "RetryPolicy",
    "Selection",
    "Snapshot",
    "StaleCarryError",
    "StateRow",
    "StatementRow",
    "Store",
    "StoreClosedError",
    "StoreError",
    "StoreFullError",
    "StoreInUseError",
    "StoreMissingError",
    "StoreReadOnlyError",
    "StoreRefusedError",
    "StoreUnavailableError",
    "StoreVersionError",
    "StoredEntity",
    "StoredMetric",
    "StreamInfo",
    "TOO_OLD",
    "TooManyColumnsError",
    "TopNRow",
    "TopRecord",
    "Value",
    "cells",
    "decode",
    "decode_label_sums",
    "decode_labels",
    "decode_numbers",
    "encode_label_sums",
    "encode_labels",
    "encode_numbers",
    "open_store",
}
OUTBOX = {
    "Changes",
    "LayoutEntry",
    "NoOutboxError",
    "Outbox",
    "OutboxFileError",
    "OutboxSettings",
}
EXPORT = {
    "PROMETHEUS_ADDRESSES",
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
    "TelemetryServer",
    "by_label",
    "check_address",
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
}
WEB = {
    "WebServer",
    "WebSettings",
    "make_app",
}
TELEMETRY = {
    "BATCH_SIZES",
    "Component",
    "ComponentKind",
    "DURATIONS_NS",
    "DURATIONS_S",
    "Distribution",
    "Family",
    "Instrument",
    "InstrumentKind",
    "NO_BATCHES",
    "NO_DURATIONS",
    "PrometheusCollector",
    "Registration",
    "Registry",
    "RegistryStats",
    "counter",
    "default_registry",
    "gauge",
    "histogram",
    "merged",
    "observe",
    "prometheus_names",
    "register",
    "up_down",
}
TESTING = {
    "ManualClock",
}
PROMISED = [
    pytest.param(batchmill, QUEUE | ERRORS | {"Client", "__version__"}, id="batchmill"),
    pytest.param(batchmill.queue, QUEUE, id="batchmill.queue"),
    pytest.param(batchmill.pressure, PRESSURE, id="batchmill.pressure"),
    pytest.param(batchmill.batcher, BATCHER, id="batchmill.batcher"),
    pytest.param(batchmill.flows, FLOWS, id="batchmill.flows"),
    pytest.param(batchmill.sources, SOURCES, id="batchmill.sources"),
    pytest.param(batchmill.oal, OAL, id="batchmill.oal"),
    pytest.param(batchmill.kafka, KAFKA, id="batchmill.kafka"),
    pytest.param(batchmill.spool, SPOOL, id="batchmill.spool"),
    pytest.param(batchmill.aggregate, AGGREGATE, id="batchmill.aggregate"),
    pytest.param(batchmill.client, CLIENT, id="batchmill.client"),
    pytest.param(batchmill.store, STORE, id="batchmill.store"),
    pytest.param(batchmill.outbox, OUTBOX, id="batchmill.outbox"),
    pytest.param(batchmill.export, EXPORT, id="batchmill.export"),
    pytest.param(batchmill.web, WEB, id="batchmill.web"),
    pytest.param(batchmill.telemetry, TELEMETRY, id="batchmill.telemetry"),
    pytest.param(batchmill.testing, TESTING, id="batchmill.testing"),
]


@pytest.mark.parametrize(("module", "names"), PROMISED)
def test_names_are_pinned(module: ModuleType, names: set[str]) -> None:
    """Adding or removing a public name is a decision, and so a change of this test."""
    assert set(module.__all__) == names


@pytest.mark.parametrize(("module", "names"), PROMISED)
def test_names_are_listed_once(module: ModuleType, names: set[str]) -> None:
    """No name stands in __all__ twice."""
    assert len(module.__all__) == len(names)


@pytest.mark.parametrize(("module", "names"), PROMISED)
def test_names_exist(module: ModuleType, names: set[str]) -> None:
    """Each promised name is there."""
    assert [name for name in sorted(names) if not hasattr(module, name)] == []


def test_both_modules_mean_the_same() -> None:
    """A name taken from batchmill is the one of batchmill.queue."""
    different = [
        name for name in QUEUE if getattr(batchmill, name) is not getattr(batchmill.queue, name)
    ]
    assert different == []


def test_public_things_have_a_docstring() -> None:
    """help() has something to say about each public class, error and function."""
    things = {name: getattr(batchmill, name) for name in QUEUE | ERRORS}
    assert [name for name, thing in things.items() if not (thing.__doc__ or "").strip()] == []
