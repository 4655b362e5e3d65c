"""The pages of the shop: what happens in its eight services when a visitor requests one."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from batchmill.demo.calls import (
    FAILED_PRECONDITION,
    OK,
    UNAVAILABLE,
    Database,
    call_cache,
    call_grpc,
    call_http,
    call_outside,
    publish,
    receive_http,
    run_statement,
)
from batchmill.demo.steps import Draft, Step

PRODUCTS = Database("postgresql", "products-db.shop", 5432, "products")
ORDERS = Database("postgresql", "orders-db.shop", 5432, "orders")
PARCELS = Database("mysql", "parcels-db.shop", 3306, "parcels")
WORDS = ("lamp", "chair", "kettle", "rug", "vase", "clock", "shelf", "mirror")
MOST_PRODUCTS = 400

Page = Callable[[Draft], int]
"""What ``web`` does for a page; returns the status."""


def visit(chance: random.Random, *, incident: bool = False) -> Step:
    """A visitor's request for one page, from the gateway on.

    During an incident the catalogue's database is overloaded: what it is asked takes long, and half
    of it fails.
    """
    [page] = chance.choices(list(PAGES), weights=[weight for weight, _ in PAGES.values()])
    method, route = page.split(" ", 1)
    path = route.replace("{id}", str(_product(chance)))
    make = PAGES[page][1]

    def through_the_gateway(gateway: Draft) -> int:
        gateway.work(0.6)
        call_cache(gateway, "GET", f"session:{chance.randrange(10_000)}")
        return call_http(gateway, "web", method, route, path, make)

    root = Draft(chance, "gateway", "SERVER", "", incident=incident)
    receive_http(root, method, route, path, through_the_gateway)
    return root.step()


def _home(web: Draft) -> int:
    web.work(2)
    call_cache(web, "GET", "page:home")
    if web.chance.random() < 0.7:
        return 200
    status = call_http(web, "catalogue", "GET", "/offers", "/offers", _offers)
    call_cache(web, "SETEX", "page:home")
    return status


def _offers(catalogue: Draft) -> int:
    catalogue.work(1)
    text = "SELECT id, title, price FROM products WHERE offered ORDER BY price LIMIT 12"
    return _ok(_read_products(catalogue, text, 6))


def _search(web: Draft) -> int:
    web.work(2)
    word = web.chance.choice(WORDS)

    def find(catalogue: Draft) -> int:
        catalogue.work(1.5)
        text = (
            f"SELECT id, title, price FROM products WHERE description ILIKE '%{word}%' "
            f"ORDER BY price LIMIT 24 OFFSET {24 * catalogue.chance.randrange(4)}"
        )
        return _ok(_read_products(catalogue, text, 28, slow=0.04))

    return call_http(web, "catalogue", "GET", "/search", f"/search?q={word}", find)


def _product_page(web: Draft) -> int:
    web.work(2)
    wanted = int(str(web.attributes["url.path"]).rsplit("/", 1)[1])

    def look_up(catalogue: Draft) -> int:
        catalogue.work(0.8)
        call_cache(catalogue, "GET", f"product:{wanted}")
        if catalogue.chance.random() < 0.6:
            return 200
        text = f"SELECT * FROM products WHERE id = {wanted}"
        if not _read_products(catalogue, text, 3, broken=0.01):
            return 500
        if wanted > 0.97 * MOST_PRODUCTS:  # sold out, and gone
            return 404
        call_cache(catalogue, "SET", f"product:{wanted}")
        return 200

    return call_http(web, "catalogue", "GET", "/products/{id}", f"/products/{wanted}", look_up)


def _add_to_cart(web: Draft) -> int:
    web.work(1.5)
    visitor = web.chance.randrange(10_000)

    def add(cart: Draft) -> int:
        cart.work(1)
        call_cache(cart, "HSET", f"cart:{visitor} {_product(cart.chance)} 1")
        call_cache(cart, "EXPIRE", f"cart:{visitor} 3600")
        return 201

    return call_http(web, "cart", "POST", "/carts/{id}/items", f"/carts/{visitor}/items", add)


def _buy(web: Draft) -> int:
    web.work(2)
    return call_http(web, "checkout", "POST", "/orders", "/orders", _order)


def _order(checkout: Draft) -> int:
    visitor = checkout.chance.randrange(10_000)
    checkout.work(2)

    def read_cart(cart: Draft) -> int:
        cart.work(0.8)
        call_cache(cart, "HGETALL", f"cart:{visitor}")
        return 200

    call_http(checkout, "cart", "GET", "/carts/{id}", f"/carts/{visitor}", read_cart)
    paid = call_grpc(checkout, "payment", "shop.Payment", "Charge", _charge)
    if paid != OK:
        return 503 if paid == UNAVAILABLE else 402
    number = checkout.chance.randrange(1_000_000)
    text = f"INSERT INTO orders (id, visitor, state) VALUES ({number}, {visitor}, 'paid')"
    if not run_statement(checkout, ORDERS, text, "orders", 5, slow=0.03, broken=0.01):
        return 500
    publish(checkout, "orders", (("shipping", _pack), ("mail", _confirm)))
    return 201


def _charge(payment: Draft) -> int:
    payment.work(1.5)
    luck = payment.chance.random()

    def bank(call: Draft) -> int:
        if luck < 0.03:
            call.work_between(900, 1000)
            return 0
        call.work(45)
        return 402 if luck < 0.08 else 200

    status = call_outside(payment, "bank.example", "POST", "/v1/charges", bank)
    if status == 0:
        return UNAVAILABLE
    amount = payment.chance.randrange(500, 50_000) / 100
    text = f"INSERT INTO payments (amount, state) VALUES ({amount:.2f}, {status})"
    run_statement(payment, ORDERS, text, "payments", 4, slow=0.02)
    return OK if status == 200 else FAILED_PRECONDITION


def _pack(shipping: Draft) -> None:
    shipping.work(3)
    text = f"SELECT size FROM boxes WHERE weight_g > {shipping.chance.randrange(5_000)} LIMIT 1"
    run_statement(shipping, PARCELS, text, "boxes", 4, slow=0.05)
    number = shipping.chance.randrange(1_000_000)
    text = f"INSERT INTO parcels (order_id, state) VALUES ({number}, 'packed')"
    run_statement(shipping, PARCELS, text, "parcels", 6)


def _confirm(mail: Draft) -> None:
    mail.work(2)
    written = mail.child("INTERNAL", "write letter")
    written.work(4)
    mail.wait_for(written)

    def relay(call: Draft) -> int:
        call.work(30)
        return 503 if call.chance.random() < 0.02 else 202

    if call_outside(mail, "relay.example", "POST", "/send", relay) >= 500:
        mail.fail("503", "the relay did not take the letter")


def _product(chance: random.Random) -> int:
    # The first ones sell best.
    return min(1 + int(chance.expovariate(1 / 80)), MOST_PRODUCTS)


def _read_products(
    catalogue: Draft, text: str, usual_ms: float, *, slow: float = 0.0, broken: float = 0.0
) -> bool:
    if catalogue.incident:
        slow, broken = 1.0, 0.5
    return run_statement(catalogue, PRODUCTS, text, "products", usual_ms, slow=slow, broken=broken)


def _ok(succeeded: bool) -> int:
    return 200 if succeeded else 500


PAGES: Mapping[str, tuple[int, Page]] = {
    "GET /": (25, _home),
    "GET /search": (25, _search),
    "GET /products/{id}": (30, _product_page),
    "POST /cart": (12, _add_to_cart),
    "POST /checkout": (8, _buy),
}
"""The pages, how often each is requested (of a hundred), and what ``web`` does for it."""
