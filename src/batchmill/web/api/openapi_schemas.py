"""What the answers of the API look like, as JSON Schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]

TEXT: Schema = {"type": "string"}
_WHOLE: Schema = {"type": "integer"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_FIGURE: Schema = {"type": ["number", "null"]}
_SHARE: Schema = {"type": ["number", "null"], "minimum": 0, "maximum": 1}
_GRAIN: Schema = {"enum": ["minute", "hour", "day"]}


def _list(of: Schema) -> Schema:
    return {"type": "array", "items": of}


def _object(**properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": {name.rstrip("_"): each for name, each in properties.items()},
        "required": [name.rstrip("_") for name in properties],
        "additionalProperties": False,
    }


_FIGURES = {"cpm": _FIGURE, "avg": _FIGURE, "p99": _FIGURE, "success": _SHARE, "apdex": _SHARE}
_PART = {"cpm": _FIGURE, "avg": _FIGURE, "p99": _FIGURE, "success": _SHARE}
_TOWARDS = {"cpm": _FIGURE, "avg": _FIGURE, "success": _SHARE}
_WHO = {"id": TEXT, "name": TEXT}
_LAYERED = {**_WHO, "layers": _list(TEXT)}
_RANGE = {"from_": _WHOLE, "to": _WHOLE}
_LABELS: Schema = {"type": "object", "additionalProperties": TEXT}
# A moment and a number as text; not as prefixItems, which few readers of such documents know.
_SAMPLE: Schema = {
    "type": "array",
    "items": {"type": ["number", "string"]},
    "minItems": 2,
    "maxItems": 2,
}

SCHEMAS: Mapping[str, Schema] = {
    "Error": _object(error=TEXT),
    "Status": _object(
        version=TEXT,
        now=_WHOLE,
        store=_object(ok={"type": "boolean"}, fault={"type": ["string", "null"]}),
        newest_minute={"type": ["integer", "null"]},
        answers={"type": "object", "additionalProperties": _COUNT},
    ),
    "Metrics": _object(
        metrics=_list(
            _object(
                name=TEXT,
                source=TEXT,
                function=TEXT,
                labelled={"type": "boolean"},
                definition=TEXT,
                active={"type": "boolean"},
                since={"type": ["integer", "null"]},
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
        times=_list(_WHOLE),
        series=_list(
            _object(
                entity=_object(**_LAYERED),
                values=_list(
                    {
                        "type": ["number", "object", "null"],
                        "additionalProperties": {"type": "number"},
                    }
                ),
            )
        ),
        left_out=_COUNT,
    ),
    "Services": _object(
        grain=_GRAIN,
        **_RANGE,
        times=_list(_WHOLE),
        total=_COUNT,
        services=_list(
            _object(
                **_LAYERED,
                range=_object(**_FIGURES),
                series=_object(**{name: _list(each) for name, each in _FIGURES.items()}),
            )
        ),
    ),
    "Service": _object(
        service=_object(**_LAYERED),
        grain=_GRAIN,
        **_RANGE,
        times=_list(_WHOLE),
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
        callers=_list(_object(**_WHO, **_TOWARDS)),
        callees=_list(_object(**_WHO, **_TOWARDS)),
        statements=_list(
            _object(
                database={"type": ["string", "null"]},
                statement=TEXT,
                normalised=TEXT,
                latency=_WHOLE,
                runs=_COUNT,
                total_ms=_WHOLE,
                trace_id=TEXT,
                time=_WHOLE,
            )
        ),
        left_out=_object(
            endpoints=_COUNT,
            instances=_COUNT,
            callers=_COUNT,
            callees=_COUNT,
            statements=_COUNT,
        ),
    ),
    "Topology": _object(
        **_RANGE,
        nodes=_list(_object(**_LAYERED, **_TOWARDS)),
        edges=_list(_object(from_=TEXT, to=TEXT, **_PART)),
        left_out=_object(nodes=_COUNT, edges=_COUNT),
    ),
    "TopN": _object(
        stream=TEXT,
        streams=_list(TEXT),
        records=_list(
            _object(
                entity=_object(**_WHO),
                bucket=_WHOLE,
                rank=_COUNT,
                latency=_WHOLE,
                time=_WHOLE,
                trace_id=TEXT,
                span_id=TEXT,
                statement=TEXT,
                normalised=TEXT,
                runs=_COUNT,
                total_ms=_WHOLE,
            )
        ),
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
