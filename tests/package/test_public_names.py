"""The public names: what is promised, no more and no less."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import pytest

import batchmill
import batchmill.queue

ERRORS = """
    BatchmillError ConfigError HandlerExistsError MissingExtraError QueueClosedError
    QueueConflictError QueueExistsError SelectorError UnawaitedError WouldDeadlockError
"""
"""The errors that ``batchmill`` itself promises."""
PACKAGES = {
    "batchmill.queue": """
        BatchQueue BatchQueueConfig BatchQueueManager BatchQueueManagerStats BatchQueueSettings
        BatchQueueStats BufferStrategy default_manager DrainBalancer HandlerConsumer PartitionMove
        PartitionPolicy PartitionSelector PartitionStats QueueErrorHandler snapshot_queues
        ThreadLoad ThreadPolicy
    """,
    "batchmill.pressure": """
        EventKind QueueAction QueueDecision QueueFullError QueueThresholdConfig
        QueueThresholdContext QueueThresholdEvent QueueThresholdHandler QueueThresholdListener
        QueueThresholdManager QueueThresholdSettings snapshot_thresholds strategies ThresholdHandler
        ThresholdLevel ThresholdListener ThresholdStats
    """,
    "batchmill.batcher": """
        AdaptiveConcurrency Backend BackendContractError BatcherClosedError BatcherConfig
        BatcherSettings BatcherStats BatchResult bisect BreakerPolicy CircuitOpenError Clock
        DeadlineExceededError DroppedError FlushReason ItemResult MicroBatcher Outcome RetryPolicy
        snapshot_batchers SystemClock WorkerLoad
    """,
    "batchmill.flows": """
        Assignment Backpressure BatchmillError ConfigError FlowConfig FlowDispatcher
        FlowErrorHandler FlowHandler FlowSettings FlowStats LatencyStats LeastLoaded RoundRobin
        ShortestQueue snapshot_flows WorkerStats WorkerView WouldDeadlockError
    """,
    "batchmill.sources": """
        BLANK_NAME bucket_end bucket_start builtin_catalog Catalog catalog day_bucket endpoint
        endpoint_id ENDPOINT_NAME_LIMIT endpoint_relation Entity entity_id ENTITY_KINDS
        EntityIdError EntityKind Field FieldType given Grain hour_bucket instance instance_id
        INSTANCE_NAME_LIMIT instance_relation is_normal Kind minute_bucket plain_value row_of
        service service_id SERVICE_NAME_LIMIT service_relation source source_classes source_of
        SourceType SPAN_SOURCE split_entity_id suggest TIME_COLUMN UnknownNameError
    """,
    "batchmill.oal": """
        ApdexCount Arg Bucketed Clamped Condition core_script Count describe Description
        double_limbs DoubleSum exact_double Extreme Function FUNCTIONS Label LabelSum load LOG_BITS
        log_floor LogBucketed MapKey Metric MetricSet OalError OalErrors parse Path Position RANKS
        Script State Sum Tally Value
    """,
    "batchmill.kafka": """
        Behind behind check_accepted check_options check_readable ConnectionErrors decode DeltaFile
        deltas_in divide encode encode_deltas hide_secrets KafkaAddress KafkaAddressError
        KafkaLoginError KafkaLostError KafkaMessage KafkaReadError KafkaSettings KafkaSink
        KafkaStats KafkaTopicError KafkaWriteError Message message_range MessageRange
        MessageTooLargeError read_messages read_options Span span_rows Spans with_certificates
    """,
    "batchmill.spool": """
        adapter ATTRIBUTE_COLUMNS BadRowsError delta_file event_tables EventBatch EVENTS FOREIGN
        Gauge GaugedSink KEPT_COLUMNS Level Measure Overloaded PackedSpans Pressure RESOURCE_COLUMNS
        rows_in SEGMENT_COLUMNS SinkSettings SinkStats SPAN_COLUMNS SPAN_SCHEMA SPAN_SOURCE
        span_table SpanBatch SpanColumn SpanSink Spool SpoolClosedError SpoolSettings SpoolStats
        SpoolWriteError STATUS_MESSAGE table_of Unread unread
    """,
    "batchmill.traces": """
        KeepSettings KeepStats SCHEMA SpanExample SpanKeeper SpanMeaning SpanReader Trace TraceQuery
        TraceSpan TraceSummary
    """,
    "batchmill.aggregate": """
        AggregationResult AggregationSettings Aggregator CACHE_READ CACHE_WRITE Column
        Contribution contribution
        DATABASE DEFAULT_APDEX_MS Deltas DeltasError entity_number EntityAccount EntityBook
        EntityBudget EntityLimiter from_arrow is_deltas is_readable is_statements LARGEST_DOUBLE
        MOST_MS normalise NORMALISED Offender OVERFLOW Overflow read_whole Reasons row_checks
        ROW_COUNT rows_by_minute Runs SERVICE_DATABASE SlowestStatements SlowThresholds SourcePlan
        Statement STATEMENT_SOURCE statements_from_arrow statements_to_arrow Tallies TallyColumn
        TIMESTAMP timestamps to_arrow TopNThresholds Total UnknownEntities worst
    """,
    "batchmill.client": """
        Client ClientStats EdgeSettings row_for
    """,
    "batchmill.workers": """
        CommitStats Committer Embedded EmbeddedStats exit_on_sigterm L1Worker L2Worker SourceStates
        Statement TopNWorker WorkerSettings
    """,
    "batchmill.store": """
        AlertBook AlertChange AlertChangeResult AlertEpisode AlertPhase Batch BatchGapError
        BucketList Buckets BucketValues Cell CellRows cells ChangeFile CheckpointMismatchError Claim
        ClockReading ClockRepair ClockState CommitResult CoveredTime decode decode_label_sums
        decode_labels decode_numbers Deltas DOUBTFUL encode_label_sums encode_labels encode_numbers
        EntityName EntityPage EntityRow EntityValues Exempt EXPIRED ExportPosition FencedError
        frame_metrics frame_rows frame_schema Layout LayoutChangedError MAX_LABELS
        MetricConflictError minute_of moment_of NamesClashError NotAStoreError Notification
        open_for_task open_store OpenParts OutboxDepth OutboxFile OVERFLOW_LABEL OVERFLOW_LABELS
        PartConflictError PartShare PartsMissingError PartsResult per_minute Ranking RetryPolicy
        RowsMismatchError Selection Snapshot StaleStateError StaleTaskError StatementFailedError
        StatementRow StateRow Store StoreClosedError StoredAlert StoredAlertRule StoredEntity
        StoredMetric StoreError StoreFullError StoreInUseError StoreMissingError StoreReadOnlyError
        StoreRefusedError StoreUnavailableError StoreVersionError StreamFile StreamInfo TaskAddress
        TOO_MANY_LABELS TOO_OLD TooManyColumnsError TopNRow TopRecord TrustedTime Value
    """,
    "batchmill.outbox": """
        Changes LayoutEntry NoOutboxError Outbox OutboxFileError OutboxSettings
    """,
    "batchmill.alerts": """
        AlertEngine AlertRulesError AlertSettings AlertStats BurnRate DEMO_RULES ExpressionError
        load_rules NoData Receiver Rule RuleFile RuleWatcher Scope Threshold
    """,
    "batchmill.export": """
        by_label check_address check_headers complete_minute entity_labels ExportedValue Exporter
        ExporterInUseError ExporterSettings ExporterStats forget_exporter help_text HttpAnswer
        HttpClient is_scraped KafkaForwarder open_sender page_address PageSettings
        PROMETHEUS_ADDRESSES PrometheusServer PrometheusSettings reads_store remote_address
        RemoteWriter RemoteWriteSettings RemoteWriteStats require_exporter Sender SendError
        series_names SeriesLimits StoreUnreadableError Target TelemetryServer to_otlp
    """,
    "batchmill.web": """
        make_app WebServer WebSettings
    """,
    "batchmill.telemetry": """
        BATCH_SIZES Component ComponentKind counter default_registry Distribution durations_by_bits
        DURATIONS_S Family gauge histogram Instrument InstrumentKind LONGEST_BITS merged NO_BATCHES
        NO_DURATIONS observe prometheus_names PrometheusCollector register Registration Registry
        RegistryStats sizes_by_bits Snapshot up_down
    """,
    "batchmill.testing": """
        ManualClock
    """,
}
"""The names of each package, in alphabetical order."""
QUEUE = set(PACKAGES["batchmill.queue"].split())
PROMISED = [
    pytest.param(
        batchmill, QUEUE | {*ERRORS.split(), "Client", "Embedded", "__version__"}, id="batchmill"
    ),
    *(
        pytest.param(import_module(package), set(names.split()), id=package)
        for package, names in PACKAGES.items()
    ),
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


@pytest.mark.parametrize(("module", "names"), PROMISED)
def test_names_are_in_dir(module: ModuleType, names: set[str]) -> None:
    """A prompt that completes names also offers those that are loaded on first use."""
    assert names - set(dir(module)) == set()


def test_both_modules_mean_the_same() -> None:
    """A name taken from batchmill is the one of batchmill.queue."""
    different = [
        name for name in QUEUE if getattr(batchmill, name) is not getattr(batchmill.queue, name)
    ]
    assert different == []


def test_public_things_have_a_docstring() -> None:
    """help() has something to say about each public class, error and function."""
    things = {name: getattr(batchmill, name) for name in QUEUE | set(ERRORS.split())}
    assert [name for name, thing in things.items() if not (thing.__doc__ or "").strip()] == []
