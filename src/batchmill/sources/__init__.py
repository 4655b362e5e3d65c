"""The event types that metrics are taken from: their fields, their entities, their time buckets.

Loads with the standard library alone.
"""

from batchmill.sources.buckets import (
    Grain,
    bucket_end,
    bucket_start,
    day_bucket,
    hour_bucket,
    minute_bucket,
)
from batchmill.sources.errors import EntityIdError, UnknownNameError, suggest
from batchmill.sources.ids import (
    BLANK_NAME,
    ENDPOINT_NAME_LIMIT,
    INSTANCE_NAME_LIMIT,
    SERVICE_NAME_LIMIT,
    endpoint_id,
    entity_id,
    instance_id,
    is_normal,
    service_id,
    split_entity_id,
)
from batchmill.sources.registry import Catalog, builtin_catalog
from batchmill.sources.types import (
    ENTITY_KINDS,
    TIME_COLUMN,
    Entity,
    EntityKind,
    Field,
    FieldType,
    Kind,
    SourceType,
)
from batchmill.sources.user import (
    catalog,
    endpoint,
    endpoint_relation,
    given,
    instance,
    instance_relation,
    row_of,
    service,
    service_relation,
    source,
    source_of,
)

__all__ = [
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
]
