"""Tests of how names of spans that look like URLs are normalised."""

from __future__ import annotations

import pytest

pytest.importorskip("pyarrow")

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from batchmill.spans.names import names_of_endpoint, normalise_name, normalise_names
from batchmill.spans.texts import Texts

CHANGED = {
    "/orders/4711": "/orders/{id}",
    "GET /orders/4711/items/3": "GET /orders/{id}/items/{id}",
    "HTTP GET /orders/1": "HTTP GET /orders/{id}",
    "GET https://shop.example/orders/1?page=2#top": "GET https://shop.example/orders/{id}",
    "/users/9f0c3e1a-54cb-4a6e-8c53-0f6ea4e9e7aa": "/users/{id}",
    "/blobs/e3b0c44298fc1c149afbf4c8996fb92427ae41e4": "/blobs/{id}",
    "/commit/9fceb02d": "/commit/{id}",
    "/ulid/01ARZ3NDEKTSV4RRFFQ69G5FAV": "/ulid/{id}",
    "/days/2024-02-29": "/days/{id}",
    "/hosts/10.0.0.17/disk": "/hosts/{id}/disk",
    "/order-123.html": "/order-{id}.html",
    "/item12345": "/item{id}",
    "/static/app.3f2a9c1d.js": "/static/app.{id}.js",
    "/mail/ann@example.org": "/mail/{id}",
    "/search?q=shoes": "/search",
    "/a/1 (retry)": "/a/{id} (retry)",
    "/t/" + "a-b1" * 20: "/t/{id}",
}
KEPT = (
    *("GET", "GET /", "/orders", "/v1/orders", "/v1.2/orders", "GET /oauth2/token", "/utf8/base64"),
    *("shop.Cart/Get1234", "process orders-1234", "SELECT 1234", "", "/s/page-2", "/x/{id}"),
    *("orders/4711 publish", "/md5/sha256"),
)


@pytest.mark.parametrize("name", CHANGED)
def test_ids_in_paths_are_replaced(name: str) -> None:
    """Numbers, dates, addresses, UUIDs, hashes, tokens; queries and fragments are left out."""
    assert normalise_name(name) == CHANGED[name]


@pytest.mark.parametrize("name", KEPT)
def test_other_names_stay(name: str) -> None:
    """Routes, versions, names of RPC methods, queues and statements."""
    assert normalise_name(name) == name


@given(st.from_regex(r"(GET )?/([a-z0-9@?#.-]{0,20}/?){0,4}", fullmatch=True))
def test_a_normalised_name_stays(name: str) -> None:
    """So a name counts the same whoever has normalised it before."""
    once = normalise_name(name)
    assert normalise_name(once) == once


def test_a_span_with_a_route_keeps_its_name() -> None:
    """The same name is another endpoint with a route and without."""
    names = Texts.of(pa.array(["/a/1", "/a/1", "/a/2", "/b", None]))
    has_route = np.array([True, False, False, False, False])
    assert normalise_names(names, has_route).strings().to_pylist() == [
        *("/a/1", "/a/{id}", "/a/{id}", "/b"),
        None,
    ]


def test_the_names_of_an_endpoint_are_those_that_become_it() -> None:
    """Of all names, whatever precedes the first id; not the name that the endpoint itself has."""
    names = sorted({*CHANGED, *CHANGED.values(), "/a?b", "/a b", "/a?x b"})
    for endpoint in {*map(normalise_name, names), "/orders/4711", ""}:
        became = [name for name in names if name != endpoint and normalise_name(name) == endpoint]
        mask = names_of_endpoint(pa.array(names), endpoint)
        assert [name for name, is_one in zip(names, mask, strict=True) if is_one] == became
