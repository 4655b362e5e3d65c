"""The micro-batcher in front of PostgreSQL: single payments become one INSERT for a hundred.

Needs a database: python examples/batcher_postgres.py postgresql://user@host/database
(pip install 'batchmill[postgres]' brings the driver).

A batch is one transaction, so a payment that the table refuses fails its whole batch; bisect()
splits that batch until the refused payment is alone. The statement is idempotent: payments that are
sent again, by a sender that got no answer or by bisect(), are stored once.

Prints:

    999 stored, 1 refused: payment-500, CheckViolation
    sent again: 999 rows, 10 batches
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import psycopg

from batchmill.batcher import BatcherSettings, MicroBatcher, bisect

TABLE = """
CREATE TEMPORARY TABLE payment (id TEXT PRIMARY KEY, cents BIGINT NOT NULL CHECK (cents > 0))
"""
INSERT = """
INSERT INTO payment SELECT * FROM unnest(%s::text[], %s::bigint[]) ON CONFLICT (id) DO NOTHING
"""


@dataclass(frozen=True)
class Payment:
    id: str
    cents: int


class PaymentTable:
    """Stores batches over one connection, which only the batcher's thread uses."""

    def __init__(self, address: str) -> None:
        self.connection = psycopg.connect(address, autocommit=True)
        self.connection.execute(TABLE)

    def store(self, payments: list[Payment]) -> list[str]:
        columns = [payment.id for payment in payments], [payment.cents for payment in payments]
        with self.connection.transaction():
            self.connection.execute(INSERT, columns)
        return ["stored"] * len(payments)


def main(address: str) -> None:
    table = PaymentTable(address)
    payments = [Payment(f"payment-{number}", 100 + number) for number in range(1000)]
    payments[500] = Payment("payment-500", -1)
    settings = BatcherSettings(batch_size=100, linger_ms=60_000, on_batch_failure=bisect())

    with MicroBatcher[Payment](table.store, settings) as batcher:
        results = [future.result() for future in batcher.submit_many(payments)]
    stored = sum(result.is_success for result in results)
    (refused,) = [result for result in results if result.is_failure]
    print(f"{stored} stored, 1 refused: {refused.item.id}, {type(refused.error).__name__}")

    with MicroBatcher[Payment](table.store, settings) as batcher:
        batcher.submit_many(payments)
    [(rows,)] = table.connection.execute("SELECT count(*) FROM payment").fetchall()
    print(f"sent again: {rows} rows, {batcher.stats().batches} batches")
    table.connection.close()


if __name__ == "__main__":
    main(sys.argv[1])
