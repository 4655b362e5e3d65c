"""What the tests of the pages share: ``batchmill web``, and a store whose calls are known."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from batchmill.store import Store, open_store
from tests.kit.processes import Life
from tests.web.traffic import Call, Shop, Statement

BEGIN = int(time.time()) // 3600 * 3600 - 2 * 3600
"""The hour that is full of calls; it is over."""
OWN = f"from={BEGIN}&to={BEGIN + 3600}&grain=minute"
"""That hour, in an address."""
SLOWEST = "SELECT * FROM orders WHERE customer = ? ORDER BY placed"


def known_calls() -> list[Call]:
    """An hour of a shop: ten calls a minute, five to the cart, two of those to a database.

    shop: 20 and 40 ms, one of a hundred fails. cart: 700 ms, which is tolerated.
    """
    calls = []
    for n in range(600):
        at = BEGIN + n % 60 * 60
        calls.append(Call("shop", 20 + 20 * (n // 60 % 2), at, ok=n % 100 != 0))
        if n // 60 % 2:
            calls.append(Call("cart", 700, at, endpoint="POST /cart", caller="shop"))
        if n // 60 % 5 == 0:
            calls.append(Call("orders-db", 5, at, caller="cart", layer="VIRTUAL_DATABASE"))
    return calls


@dataclass
class Served:
    """A store, and a server of its pages."""

    address: str
    life: Life
    store: Store
    shop: Shop

    def stop(self) -> None:
        """As Ctrl-C does it, and it must end by itself."""
        os.kill(self.life.pid, signal.SIGINT)
        self.life.end(0)


@contextlib.contextmanager
def filled_store(folder: Path) -> Iterator[tuple[str, Store, Shop]]:
    """A store with the hour of known calls in it: its address, itself, and who writes to it."""
    url = f"sqlite:///{folder}/store.db"
    with open_store(url) as store:
        shop = Shop(store)
        shop.commit(known_calls(), [Statement("cart", "orders-db", SLOWEST, 900, BEGIN, runs=7)])
        yield url, store, shop


@contextlib.contextmanager
def serving(folder: Path, *given: str) -> Iterator[tuple[str, Life]]:
    """``batchmill web`` with some arguments: its address, and the process."""
    command = [sys.executable, "-m", "batchmill", "web", "--port=0", *given]
    life = Life(command, folder / "web-errors", os.environ)
    try:
        life.must_hear("serving http://.*")
        [said] = [line for line in life.lines if line.startswith("serving ")]
        yield said.removeprefix("serving ").partition(";")[0], life
    finally:
        life.kill()
