"""The files of the pages as they are served: what headers they have, and that all are there."""

from __future__ import annotations

import gzip
import http.client
import re
from collections.abc import Iterator

import pytest

from tests.kit.files import ROOT
from tests.kit.threads import WAIT_S
from tests.web.pages_kit import serving

pytest.importorskip("uvicorn")

STATIC = ROOT / "src" / "batchmill" / "web" / "static"


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A server that asks for a token; the pages need none."""
    folder = tmp_path_factory.mktemp("pages")
    given = (f"--store=sqlite:///{folder}/none.db", "--token=sesame")
    with serving(folder, *given) as (address, _):
        yield int(address.rpartition(":")[2])


def ask(
    port: int, path: str, method: str = "GET", **headers: str
) -> tuple[http.client.HTTPResponse, bytes]:
    """An answer and its body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    try:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, headers=named)
        response = connection.getresponse()
        return response, response.read()
    finally:
        connection.close()


def test_every_file_is_served(port: int) -> None:
    """As it lies in the package, with its type; the page names only files that there are."""
    files = [path for path in STATIC.rglob("*") if path.is_file()]
    assert len(files) > 20
    kinds = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
    for file in files:
        path = "/" if file.name == "index.html" else f"/static/{file.relative_to(STATIC)}"
        response, body = ask(port, path)
        assert response.status == 200, path
        assert body == file.read_bytes(), path
        kind = {".html": "text/html", "": "text/plain"} | kinds
        assert response.headers["content-type"].startswith(kind[file.suffix]), path
    named = re.findall(r'(?:src|href)="(static/[^"]+)"', (STATIC / "index.html").read_text())
    assert len(named) >= 6
    assert all((STATIC.parent / name).is_file() for name in named)


def test_nothing_but_our_own_files_may_be_loaded(port: int) -> None:
    """No inline script or style, no other host, no frame, no guessing of types, no referrer."""
    response, body = ask(port, "/")
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'self'; ")
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"
    assert re.search(rb"<style|<script>|\son\w+=|\sstyle=", body) is None
    for path in STATIC.rglob("*"):
        if path.suffix in (".js", ".css") and "vendor" not in path.parts:
            text = path.read_text("utf-8")
            assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)\w", text), path


def test_a_file_that_is_known_is_not_sent_again(port: int) -> None:
    """304 for its tag, and a packed body for whoever takes one."""
    first, body = ask(port, "/static/js/main.js")
    assert first.headers["cache-control"] == "no-cache"
    again, nothing = ask(port, "/static/js/main.js", if_none_match=first.headers["etag"])
    assert (again.status, nothing) == (304, b"")
    packed, less = ask(port, "/static/js/main.js", accept_encoding="br, gzip")
    assert packed.headers["content-encoding"] == "gzip"
    assert gzip.decompress(less) == body
    other, _ = ask(port, "/static/js/main.js", if_none_match='"other"')
    assert other.status == 200


@pytest.mark.parametrize("path", ["/", "/static/js/main.js"])
def test_pages_are_read_and_nothing_else(port: int, path: str) -> None:
    """HEAD has no body; POST, PUT and DELETE are refused."""
    head, body = ask(port, path, "HEAD")
    assert (head.status, body) == (200, b"")
    assert int(head.headers["content-length"]) > 0
    for method in ("POST", "PUT", "DELETE"):
        assert ask(port, path, method)[0].status == 405


@pytest.mark.parametrize(
    "path",
    [
        "/static/../pages.py",
        "/static/%2e%2e/pages.py",
        "/static//etc/passwd",
        "/static/js",
        "/static/",
        "/static/js/none.js",
        "/index.html",
    ],
)
def test_other_paths_are_404(port: int, path: str) -> None:
    """However it is asked for."""
    response, body = ask(port, path)
    assert response.status == 404
    assert b"error" in body


@pytest.mark.parametrize(
    ("path", "name", "root"),
    [
        ("/nothing", "/nothing", "./"),
        ("/services/c2hvcA%3D%3D.1", "/services/c2hvcA==.1", "../"),
        ("/service", "/service", "./"),
        ("/service/", "/service/", "../"),
        ("/a/b%2F%3Cscript%3E", "/a/b/&lt;script&gt;", "../"),
        ("/static/js/none.js", "/static/js/none.js", "../../"),
    ],
)
def test_a_browser_gets_a_page_that_says_so(port: int, path: str, name: str, root: str) -> None:
    """With the way to those there are, under a path of a proxy, too; programs get JSON."""
    accept = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
    response, body = ask(port, path, accept=accept)
    assert response.status == 404
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.headers["content-security-policy"].startswith("default-src 'self'; ")
    page = body.decode()
    assert f"There is no page “{name}”" in page
    assert f'href="{root}"' in page
    assert f'href="{root}static/css/base.css"' in page
    for program in ("*/*", "application/json"):
        response, body = ask(port, path, accept=program)
        assert (response.status, body[:9]) == (404, b'{"error":')


def test_a_path_of_the_api_is_json_for_a_browser_too(port: int) -> None:
    """There are no pages below it."""
    response, body = ask(port, "/api/v1/nothing", accept="text/html", authorization="Bearer sesame")
    assert (response.status, body[:9]) == (404, b'{"error":')


@pytest.mark.parametrize(
    ("path", "view"),
    [
        ("/explore?metric=service_cpm&from=now-2h", "./#/explore?metric=service_cpm&from=now-2h"),
        ("/traces?service=a%20b", "./#/traces?service=a%20b"),
        ("/service/c2hvcA%3D%3D.1", "../#/service/c2hvcA%3D%3D.1"),
        ("/trace/0af7", "../#/trace/0af7"),
        ("/service/Pz8%2F.1?from=now-2h", "../#/service/Pz8%2F.1?from=now-2h"),
        ("/endpoint/GET%20/cart", "../../#/endpoint/GET%20%2Fcart"),
    ],
)
def test_an_address_without_a_hash_leads_to_its_view(port: int, path: str, view: str) -> None:
    """By a relative redirect, which also works under a path of a proxy."""
    response, _ = ask(port, path)
    assert response.status == 307
    assert response.headers["location"] == view
