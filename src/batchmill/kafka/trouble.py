"""What a client of librdkafka hears of its connections: it tells of each message only that its time
was up, and of the reason elsewhere, and over and over."""

from __future__ import annotations

from confluent_kafka import KafkaError

REFUSED = (KafkaError._AUTHENTICATION, KafkaError._SSL)
_VAGUE = (KafkaError._ALL_BROKERS_DOWN, KafkaError._TRANSPORT)


class Trouble:
    """Remembers the last reason; a client takes it as its ``error_cb``.

    A broker that refuses a login closes the connection, so that librdkafka finds it down right
    after that: what is vague does not hide what is not.
    """

    def __init__(self) -> None:
        self._error: KafkaError | None = None

    def __call__(self, error: KafkaError) -> None:
        """Hear of it."""
        if self._error is None or error.code() not in _VAGUE:
            self._error = error

    @property
    def refused(self) -> bool:
        """Whether the broker is there, and does not let this client in."""
        return self._error is not None and self._error.code() in REFUSED

    @property
    def name(self) -> str:
        """librdkafka's name for the reason; empty: nothing was heard."""
        return "" if self._error is None else str(self._error.name())

    @property
    def text(self) -> str:
        """What it said; empty: nothing."""
        return "" if self._error is None else str(self._error.str())

    def forget(self) -> None:
        """All is well again."""
        self._error = None
