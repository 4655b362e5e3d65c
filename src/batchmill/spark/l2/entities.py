"""The entities of a micro-batch: from the columns that name them to the store's rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchmill.sources import SourceType, entity_id, split_entity_id
from batchmill.store import EntityRow

FIXED_LAYERS: Mapping[str, str] = {
    "DatabaseAccess": "VIRTUAL_DATABASE",
    "CacheAccess": "VIRTUAL_CACHE",
    "MQAccess": "VIRTUAL_MQ",
    "MQEndpointAccess": "VIRTUAL_MQ",
    "GenAIProviderAccess": "VIRTUAL_GENAI",
    "GenAIModelAccess": "VIRTUAL_GENAI",
    **dict.fromkeys(
        (
            "BrowserAppPerf",
            "BrowserAppPagePerf",
            "BrowserAppSingleVersionPerf",
            "BrowserAppTraffic",
            "BrowserAppPageTraffic",
            "BrowserAppSingleVersionTraffic",
            "BrowserAppResourcePerf",
            "BrowserAppWebVitalsPerf",
            "BrowserAppWebInteractionPerf",
        ),
        "BROWSER",
    ),
}
"""The layer of sources whose rows do not carry one."""


class EntityBook:
    """Numbers the entities of one batch, each once, whichever sources speak of it."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, str], int] = {}
        self._layers: list[set[str]] = []
        self._rows: list[tuple[str, str, tuple[str, ...]]] = []

    def number(self, kind: str, id: str, names: tuple[str, ...], layers: set[str]) -> int:  # noqa: A002
        """The entity's number, a new one at first sight."""
        found = self._numbers.get((kind, id))
        if found is None:
            found = self._numbers[kind, id] = len(self._rows)
            self._rows.append((kind, id, names))
            self._layers.append(set())
        self._layers[found] |= layers
        return found

    def rows(self) -> list[EntityRow]:
        """Every entity, by number."""
        return [
            EntityRow(kind, id_, names[-1], frozenset(layers), _roles(kind, names))
            for (kind, id_, names), layers in zip(self._rows, self._layers, strict=True)
        ]

    def numbers_of(
        self, source: SourceType, roles: Sequence[pa.ChunkedArray]
    ) -> npt.NDArray[np.int64]:
        """The entity of each row, from its role columns (in the order of the entity's rule)."""
        fields = [each for each in source.entity.roles.values() if not each.startswith("=")]
        codes, firsts = _distinct(roles)
        values = [column.take(pa.array(firsts)).to_pylist() for column in roles]
        numbers = [
            self._number_of(source, dict(zip(fields, row, strict=True)))
            for row in zip(*values, strict=True)
        ]
        return np.asarray(numbers, dtype=np.int64)[codes]

    def _number_of(self, source: SourceType, row: Mapping[str, str | None]) -> int:
        kind = source.entity.kind
        id_ = entity_id(source, row)
        layers = {
            layer
            for role, each in source.entity.roles.items()
            if role == "layer" and (layer := row.get(each))
        }
        if "=" in source.entity.roles.get("layer", "")[:1] and source.name in FIXED_LAYERS:
            layers.add(FIXED_LAYERS[source.name])
        return self.number(kind, id_, split_entity_id(kind, id_), layers)


def _distinct(
    columns: Sequence[pa.ChunkedArray],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """For each row the number of its combination of values; for each combination a row with it."""
    codes = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        coded = column.combine_chunks().dictionary_encode(null_encoding="encode")
        if isinstance(coded, pa.ChunkedArray):
            coded = coded.combine_chunks()
        here = coded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
        # Renumbered after each column, so that the product never outgrows 64 bits.
        _, codes = np.unique(codes * (len(coded.dictionary) + 1) + here, return_inverse=True)
    _, firsts = np.unique(codes, return_index=True)
    return codes, firsts


_NAMES: Mapping[str, tuple[str, ...]] = {
    "service": ("service",),
    "instance": ("service", "name"),
    "endpoint": ("service", "name"),
    "service_relation": ("source_service", "dest_service"),
    "instance_relation": ("source_service", "source_name", "dest_service", "dest_name"),
    "endpoint_relation": ("source_service", "source_name", "dest_service", "dest_name"),
    "given": ("id",),
}


def _roles(kind: str, names: tuple[str, ...]) -> dict[str, str]:
    return dict(zip(_NAMES[kind], names, strict=True))
