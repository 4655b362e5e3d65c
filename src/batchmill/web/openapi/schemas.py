"""The JSON Schemas of the API's responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchmill.sources import Grain
from batchmill.web.api.parameters import STEPS

Schema = Mapping[str, Any]

TEXT: Schema = {"type": "string"}
_WHOLE: Schema = {"type": "integer"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_FIGURE: Schema = {"type": ["number", "null"]}
_SHARE: Schema = {"type": ["number", "null"], "minimum": 0, "maximum": 1}
_GRAIN: Schema = {"enum": list(STEPS)}


def _list(of: Schema) -> Schema:
    return {"type": "array", "items": of}


def _object(**properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": {name.rstrip("_"): schema for name, schema in properties.items()},
        "required": [name.rstrip("_") for name in properties],
        "additionalProperties": False,
    }


_FIGURES = {"cpm": _FIGURE, "avg": _FIGURE, "p99": _FIGURE, "success": _SHARE, "apdex": _SHARE}
_PART = {"cpm": _FIGURE, "avg": _FIGURE, "p99": _FIGURE, "success": _SHARE}
_TOWARDS = {"cpm": _FIGURE, "avg": _FIGURE, "success": _SHARE}
_SIDE: Schema = {**_object(**_PART), "type": ["object", "null"]}
_BOTH_SIDES = {**_PART, "caller": _SIDE, "callee": _SIDE}
_INCOMPLETE: Schema = {"type": ["integer", "null"]}
"""The start of the first bucket that may still grow."""
_WHO = {"id": TEXT, "name": TEXT}
_LAYERED = {**_WHO, "layers": _list(TEXT)}
_RANGE = {"from_": _WHOLE, "to": _WHOLE}
_LABELS: Schema = {"type": "object", "additionalProperties": TEXT}
_NO_TEXT: Schema = {"type": ["string", "null"]}
_ABOUT = {"entity_id": TEXT, "entity_name": TEXT}
"""In a record that is about an entity."""
_ALERTED = {**_ABOUT, "entity_kind": _NO_TEXT, "service_id": _NO_TEXT}
# A moment and a number as text; not as prefixItems, which few readers of such documents know.
_SAMPLE: Schema = {
    "type": "array",
    "items": {"type": ["number", "string"]},
    "minItems": 2,
    "maxItems": 2,
}

_STATEMENT: Schema = _object(
    database_id=_NO_TEXT,
    database_name=_NO_TEXT,
    statement=TEXT,
    normalised=TEXT,
    latency=_WHOLE,
    runs=_COUNT,
    total_ms=_WHOLE,
    trace_id=TEXT,
    time_us=_WHOLE,
)
_BUSIEST: Schema = {"type": ["integer", "null"], "minimum": 1}
"""Of how many services a value is; null: of all."""
_SERVICES = {
    "grain": _GRAIN,
    **_RANGE,
    "times": _list(_WHOLE),
    "incomplete": _INCOMPLETE,
    "all": _object(**_PART, busiest=_BUSIEST),
    "lowest": {**_object(**_WHO, success=_SHARE, busiest=_BUSIEST), "type": ["object", "null"]},
    "services": _list(
        _object(
            **_LAYERED,
            range=_object(**_FIGURES),
            series=_object(**{name: _list(schema) for name, schema in _FIGURES.items()}),
        )
    ),
}
_REFERENCE = {"kind": TEXT, "id": TEXT, "name": TEXT}
_UNIT: Schema = {"enum": ["per_minute", "count", "share", "score", "ms", "bytes", ""]}
_VALUE: Schema = {
    "type": ["number", "object", "null"],
    "additionalProperties": {"type": "number"},
}

SCHEMAS: Mapping[str, Schema] = {
    "Error": _object(error=TEXT),
    "Status": _object(
        version=TEXT,
        now_s=_WHOLE,
        store=_object(
            ok={"type": "boolean"},
            fault={"type": ["string", "null"]},
            url={"type": ["string", "null"]},
        ),
        newest_minute_s={"type": ["integer", "null"]},
        answers={"type": "object", "additionalProperties": _COUNT},
    ),
    "Metrics": _object(
        metrics=_list(
            _object(
                name=TEXT,
                version=_COUNT,
                source=TEXT,
                entity_kind=_NO_TEXT,
                function=TEXT,
                decorator=_NO_TEXT,
                labelled={"type": "boolean"},
                unit=_UNIT,
                factor=_COUNT,
                least=_COUNT,
                definition=TEXT,
                active={"type": "boolean"},
                since_minute={"type": ["integer", "null"]},
                series={"type": ["string", "null"]},
            )
        )
    ),
    "Entities": _object(
        entities=_list(
            _object(
                kind=TEXT,
                **_LAYERED,
                roles={"type": "object", "additionalProperties": TEXT},
            )
        ),
        total=_COUNT,
    ),
    "Values": _object(
        metric=TEXT,
        grain=_GRAIN,
        **_RANGE,
        times=_list(_WHOLE),
        incomplete=_INCOMPLETE,
        series=_list(
            _object(
                **_ABOUT,
                entity_kind=TEXT,
                layers=_list(TEXT),
                over=_VALUE,
                values=_list(_VALUE),
            )
        ),
        left_out=_COUNT,
    ),
    "Services": _object(
        **_SERVICES, total=_COUNT, before={**_object(**_SERVICES), "type": ["object", "null"]}
    ),
    "Service": _object(
        service=_object(**_LAYERED),
        measured_by={"enum": ["itself", "callers"]},
        grain=_GRAIN,
        **_RANGE,
        times=_list(_WHOLE),
        incomplete=_INCOMPLETE,
        range=_object(**_FIGURES),
        series=_object(
            cpm=_list(_FIGURE),
            avg=_list(_FIGURE),
            success=_list(_SHARE),
            apdex=_list(_SHARE),
            percentiles=_object(
                **{rank: _list(_FIGURE) for rank in ("p50", "p75", "p90", "p95", "p99")}
            ),
        ),
        endpoints=_list(_object(**_WHO, **_PART)),
        instances=_list(_object(**_WHO, **_PART)),
        callers=_list(_object(**_WHO, **_BOTH_SIDES)),
        callees=_list(_object(**_WHO, **_BOTH_SIDES)),
        statements=_list(_STATEMENT),
        left_out=_object(
            endpoints=_COUNT,
            instances=_COUNT,
            callers=_COUNT,
            callees=_COUNT,
            statements=_COUNT,
        ),
    ),
    "Entity": _object(
        entity=_object(
            **_REFERENCE, layers=_list(TEXT), role=TEXT, ends=_list(_object(**_REFERENCE))
        ),
        grain=_GRAIN,
        **_RANGE,
        times=_list(_WHOLE),
        incomplete=_INCOMPLETE,
        groups=_list(
            _object(
                key=TEXT,
                title=TEXT,
                range=_object(**_FIGURES),
                charts=_list(
                    _object(
                        key=TEXT,
                        title=TEXT,
                        metric=TEXT,
                        unit=_UNIT,
                        least=_COUNT,
                        series=_list(_object(label=TEXT, over=_FIGURE, values=_list(_FIGURE))),
                        left_out=_COUNT,
                    )
                ),
            )
        ),
        lists=_list(
            _object(
                key=TEXT,
                title=TEXT,
                label=TEXT,
                empty=TEXT,
                rows=_list(
                    _object(
                        **_REFERENCE,
                        relation_kind=_NO_TEXT,
                        relation_id=_NO_TEXT,
                        **_PART,
                        caller=_SIDE,
                        callee=_SIDE,
                    )
                ),
                left_out=_COUNT,
            )
        ),
        statements={
            "anyOf": [
                _object(
                    title=TEXT, label=TEXT, rows=_list(_STATEMENT), left_out=_COUNT, empty=TEXT
                ),
                {"type": "null"},
            ]
        },
    ),
    "Topology": _object(
        **_RANGE,
        nodes=_list(_object(**_LAYERED, **_TOWARDS)),
        edges=_list(_object(from_=TEXT, to=TEXT, **_BOTH_SIDES)),
        left_out=_object(nodes=_COUNT, edges=_COUNT),
    ),
    "TopN": _object(
        stream=TEXT,
        streams=_list(TEXT),
        records=_list(
            _object(
                stream=TEXT,
                grain={"enum": [grain.value for grain in Grain]},
                bucket=_WHOLE,
                **_ABOUT,
                rank=_COUNT,
                latency=_WHOLE,
                time_us=_WHOLE,
                trace_id=TEXT,
                span_id=TEXT,
                statement=TEXT,
                normalised=TEXT,
                runs=_COUNT,
                total_ms=_WHOLE,
            )
        ),
    ),
    "Alerts": _object(
        **_RANGE,
        evaluated_s={"type": ["integer", "null"]},
        rules=_list(
            _object(
                id=TEXT,
                condition=TEXT,
                severity=TEXT,
                metrics=_list(TEXT),
                firing=_COUNT,
                pending=_COUNT,
            )
        ),
        alerts=_list(
            _object(
                rule=TEXT,
                **_ALERTED,
                phase={"enum": ["firing", "pending"]},
                since_s=_WHOLE,
                notified_s=_WHOLE,
                cleared=_COUNT,
                severity=TEXT,
                value=_FIGURE,
                message=TEXT,
                labels=_LABELS,
                is_notified={"type": "boolean"},
            )
        ),
        history=_list(
            _object(
                rule=TEXT,
                **_ALERTED,
                starts_s=_WHOLE,
                ends_s={"type": ["integer", "null"]},
                severity=TEXT,
                value=_FIGURE,
                message=TEXT,
            )
        ),
        more={"type": "boolean"},
    ),
    "Pipeline": {"type": "object"},
    "PrometheusError": _object(status={"const": "error"}, errorType=TEXT, error=TEXT),
    "Labels": _object(status={"const": "success"}, data=_list(TEXT)),
    "Series": _object(status={"const": "success"}, data=_list(_LABELS)),
    "Metadata": _object(
        status={"const": "success"},
        data={
            "type": "object",
            "additionalProperties": _list(_object(type=TEXT, help=TEXT, unit=TEXT)),
        },
    ),
    "BuildInfo": _object(status={"const": "success"}, data=_LABELS),
    "Answer": _object(
        status={"const": "success"},
        data={
            "type": "object",
            "properties": {
                "resultType": {"enum": ["vector", "matrix", "scalar"]},
                "result": {"type": "array"},
            },
            "required": ["resultType", "result"],
            "oneOf": [
                {
                    "properties": {
                        "resultType": {"const": "vector"},
                        "result": _list(_object(metric=_LABELS, value=_SAMPLE)),
                    }
                },
                {
                    "properties": {
                        "resultType": {"const": "matrix"},
                        "result": _list(_object(metric=_LABELS, values=_list(_SAMPLE))),
                    }
                },
                {"properties": {"resultType": {"const": "scalar"}, "result": _SAMPLE}},
            ],
        },
    ),
}


_TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}
_COUNTS: Schema = {"type": "object", "additionalProperties": _COUNT}
_MAYBE: Schema = {"type": ["integer", "null"]}
_SPAN = _object(
    **dict.fromkeys(("span_id", "service", "name", "endpoint", "kind", "status"), TEXT),
    **dict.fromkeys(("parent_span_id", "status_message", "instance"), _NO_TEXT),
    **dict.fromkeys(("depth", "duration_us", "resource_index"), _COUNT),
    start_us=_WHOLE,
    backend={**_object(**_WHO, role=TEXT), "type": ["object", "null"]},
    attributes=_TEXTS,
    events=_list(_object(time=_MAYBE, name=TEXT, attributes={"type": "object"})),
    critical=_list(_list(_WHOLE)),
)
_SUMMARY = _object(
    **dict.fromkeys(("trace_id", "service", "name"), TEXT),
    **dict.fromkeys(("duration_us", "spans", "errors", "matched_us"), _COUNT),
    start_us=_WHOLE,
    services=_COUNTS,
)
_FAULTS = _list(_object(code=_WHOLE, msg=TEXT))
TRACE_SCHEMAS: Mapping[str, Schema] = {
    "Traces": _object(
        **_RANGE,
        traces=_list(_SUMMARY),
        more={"type": "boolean"},
        oldest_s=_MAYBE,
        unreadable_files=_COUNT,
    ),
    "Trace": _object(
        trace_id=TEXT,
        start_us=_WHOLE,
        **dict.fromkeys(("duration_us", "missing", "spans_left_out"), _COUNT),
        services=_COUNTS,
        resources=_list(_TEXTS),
        spans=_list(_SPAN),
    ),
    "TraceServices": _object(
        services={"type": "object"}, kept={"type": "object"}, unreadable_files=_COUNT
    ),
    "Jaeger": _object(
        data={"type": ["array", "null"]},
        **dict.fromkeys(("total", "limit", "offset"), _COUNT),
        errors={**_FAULTS, "type": ["array", "null"]},
    ),
}
