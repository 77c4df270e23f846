"""The page's files over HTTP: policy, types, caching, nothing from outside the folder, everything named is there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from urllib.parse import urljoin

import pytest
from starlette.testclient import TestClient

import strata.serve
from tests.serve.scripted import Scripted

FOLDER = Path(strata.serve.__file__).parent / "page"
PAGES = ["/", "/live", "/docs"]


@pytest.fixture
def client(serve_script: Callable[..., AbstractContextManager[Scripted]]) -> Iterator[TestClient]:
    with serve_script([]) as server:
        yield server.client


@pytest.mark.parametrize("page", PAGES)
def test_pages_have_a_strict_policy_and_nothing_inline(client: TestClient, page: str) -> None:
    answer = client.get(page)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    directives = dict(one.split(" ", 1) for one in answer.headers["content-security-policy"].split("; "))
    assert directives["default-src"] == "'none'"
    assert directives["script-src"] == directives["style-src"] == directives["connect-src"] == "'self'"
    assert directives["frame-ancestors"] == "'none'"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert re.findall(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=|javascript:", answer.text) == []


@pytest.mark.parametrize("page", PAGES)
def test_all_that_a_page_names_is_there_and_local(client: TestClient, page: str) -> None:
    to_read, seen = [page], set()
    while to_read:
        path = to_read.pop()
        if path in seen:
            continue
        seen.add(path)
        answer = client.get(path)
        assert answer.status_code == 200, path
        if path.endswith((".html", ".js", ".css")) or path in PAGES:
            named = re.findall(r"""(?:\bsrc="|<link [^>]*href="|^import [^"]*")([^"]+)""", answer.text, re.MULTILINE)
            to_read += [urljoin(path, one) for one in named]
    assert len(seen) > 5
    assert all(path.startswith("/page/") or path in PAGES for path in seen)


def test_a_file_is_sent_once(client: TestClient) -> None:
    first = client.get("/page/chat.js")
    assert first.headers["content-type"] == "text/javascript; charset=utf-8"
    again = client.get("/page/chat.js", headers={"if-none-match": first.headers["etag"]})
    assert again.status_code == 304
    assert again.content == b""
    other = client.get("/page/live.js", headers={"if-none-match": first.headers["etag"]})
    assert other.status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "nothing.js",
        "../page_route.py",
        "%2e%2e/page_route.py",
        "..%2fpage_route.py",
        "/etc/passwd",
        "",
        "vendor",
        "%00",
    ],
)
def test_nothing_else_is_served(client: TestClient, path: str) -> None:
    answer = client.get(f"/page/{path}")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "unknown_url"


def test_what_is_vendored_has_its_licence() -> None:
    for folder in (FOLDER / "vendor").iterdir():
        assert (folder / "LICENSE").read_text().startswith("The MIT License")
