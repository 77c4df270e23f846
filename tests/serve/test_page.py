"""The page's files over HTTP: policy, types, caching, nothing from outside the folder, everything named is there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from urllib.parse import urljoin

import pytest
from starlette.testclient import TestClient

import strata.serve
from tests.serve.scripted import Serve

FOLDER = Path(strata.serve.__file__).parent / "page"
PAGES = ["/", "/live", "/docs"]
# A sentence of each licence that something here may have.
LICENCES = {
    "MIT": "Permission is hereby granted, free of charge, to any person obtaining a copy",
    "ISC": "Permission to use, copy, modify, and/or distribute this software for any purpose with or without fee",
    "BSD-3-Clause": "Redistribution and use in source and binary forms, with or without modification, are permitted",
    "Apache-2.0": "Apache License Version 2.0, January 2004",
}


@pytest.fixture
def client(serve_script: Serve) -> Iterator[TestClient]:
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
    assert directives["trusted-types"] == ("dompurify" if page == "/" else "'none'")
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
        if (path.endswith((".html", ".js", ".css")) and "/vendor/" not in path) or path in PAGES:
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


def test_what_is_vendored_is_what_its_list_says() -> None:
    """Each library's version, licence, package and its files' hashes stand in a list, and nothing else lies there."""
    vendor = FOLDER / "vendor"
    listed = json.loads((vendor / "sources.json").read_text())
    assert {folder.name for folder in vendor.iterdir() if folder.is_dir()} == set(listed)
    for name, library in listed.items():
        files = [path for path in (vendor / name).rglob("*") if path.is_file()]
        hashes = {path.relative_to(vendor / name).as_posix(): sha256(path.read_bytes()).hexdigest() for path in files}
        assert hashes == library["sha256"], name
        assert library["version"] in library["from"]
        assert LICENCES[library["licence"]] in " ".join((vendor / name / "LICENSE").read_text().split())
    assert sum(path.stat().st_size for path in vendor.rglob("*") if path.is_file()) < 1_500_000


def test_the_fonts_of_formulas_are_there(client: TestClient) -> None:
    style = "/page/vendor/katex/katex.min.css"
    fonts = set(re.findall(r"url\(([^)]+\.woff2)\)", client.get(style).text))
    assert len(fonts) == 20
    for font in fonts:
        assert client.get(urljoin(style, font)).headers["content-type"] == "font/woff2"
