"""Senders: each sends values to one kind of peer, an OpenTelemetry collector or a Kafka topic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from batchmill.errors import BatchmillError, MissingExtraError
from batchmill.export.settings import KAFKA, ExporterSettings, Target
from batchmill.export.values import ExportedValue

__all__ = ["SendError", "Sender", "open_sender"]


class SendError(BatchmillError, OSError):
    """A peer did not take what was sent."""

    reason: str
    """In a word or two; it is counted by."""
    detail: str = ""
    retry: bool = True
    """Whether the same may be taken later; False: it is what was sent that is wrong."""
    too_large: bool = False
    """Whether less at a time may be taken."""
    after_s: float | None = None
    """When the peer wants to be asked again; None: it did not say."""

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}" if self.detail else self.reason


class Sender(Protocol):
    """Sends values to a peer. Used by one thread at a time."""

    def send(self, values: Sequence[ExportedValue]) -> int:
        """Send, and return once the peer has taken them; how many data points it refused.

        Raises :class:`SendError`. Whether the peer has some of them is then not known.
        """
        ...

    def interrupt(self) -> None:
        """Have a send that waits for the peer fail soon, and no other begin; by any thread."""
        ...

    def close(self) -> None:
        """Close the connection; may be called twice."""
        ...


def open_sender(target: Target, settings: ExporterSettings) -> Sender:
    """The sender for a target; it connects when it first sends."""
    try:
        if target.scheme == KAFKA:
            from batchmill.export.senders.kafka import KafkaSender

            return KafkaSender(target, settings)
        from batchmill.export.senders.collector import GrpcSender, HttpSender

        kind = GrpcSender if target.scheme.startswith("otlp+grpc") else HttpSender
        return kind(target, settings)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("batchmill"):
            raise
        raise MissingExtraError("exporting", "export", f"{error.name} is not installed") from error
