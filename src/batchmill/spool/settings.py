"""The settings of sinks and of the spool: frozen, keyword-only, checked when made."""

from __future__ import annotations

from dataclasses import dataclass

from batchmill.errors import ConfigError, check_int, check_number

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class SinkSettings:
    """The settings that the spool and Kafka's sink have in common."""

    capacity_rows: int = 200_000
    """Rows that may wait in memory: half of it is WARNING, all of it CRITICAL."""
    capacity_bytes: int = 128 * MIB
    """Bytes that may wait in memory, in the same way."""
    retry_after_s: float = 1.0
    """What a refused sender is told to wait; twice as long at CRITICAL_PLUS."""
    close_timeout_s: float = 30.0
    """How long ``close()`` waits for the rest."""

    def __post_init__(self) -> None:
        for name in ("capacity_rows", "capacity_bytes"):
            check_int(name, getattr(self, name), 1)
        for name in ("retry_after_s", "close_timeout_s"):
            check_number(name, getattr(self, name), 0)


@dataclass(frozen=True, kw_only=True)
class SpoolSettings(SinkSettings):
    """The settings of a :class:`Spool`, which also takes each of them as an argument."""

    linger_s: float = 0.2
    """How long the first batch of a segment may wait for others; 0: not at all."""
    hurry_rows: int = 2_000
    """Rows that are worth a segment when it is known that no more are on their way; see
    :meth:`Spool.hurry`."""
    max_rows: int = 50_000
    """Rows in a segment at most; that many are written without waiting. A larger batch gets a
    segment of its own."""
    max_bytes: int = 32 * MIB
    """Bytes in a segment at most, in memory and roughly."""
    unread_warning: int = 1024 * MIB
    """Bytes of segments that the pipeline has not read: WARNING from here on."""
    unread_critical: int = 2048 * MIB
    """The same for CRITICAL: batches are refused."""
    unread_critical_plus: int = 3072 * MIB
    """The same for CRITICAL_PLUS."""
    min_free_bytes: int = 64 * MIB
    """What must stay free on the disk: less is CRITICAL. The pipeline needs room to catch up."""
    writers: int = 2
    """Segments of one type that are written at once: one is encoded while the other is synced."""

    def __post_init__(self) -> None:
        super().__post_init__()
        whole = ("hurry_rows", "max_rows", "max_bytes", "writers", "unread_warning")
        for name in (*whole, "unread_critical", "unread_critical_plus"):
            check_int(name, getattr(self, name), 1)
        check_int("min_free_bytes", self.min_free_bytes, 0)
        check_number("linger_s", self.linger_s, 0)
        if not self.unread_warning <= self.unread_critical <= self.unread_critical_plus:
            raise ConfigError(
                "unread_critical",
                self.unread_critical,
                f"from unread_warning, {self.unread_warning}, "
                f"to unread_critical_plus, {self.unread_critical_plus}",
            )
