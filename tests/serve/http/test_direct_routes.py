"""The short way to a route against FastAPI's own: the same answers to good and bad requests."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
from fastapi import APIRouter
from starlette.testclient import TestClient

from strata.serve.http import app as application
from strata.serve.http.direct_routes import DirectRoutes
from tests.serve.scripted import Scripted, delta

JSON = {"content-type": "application/json"}
GOOD = b'{"prompt": "Hi", "max_tokens": 1}'
REQUESTS = {
    "good": (JSON, GOOD),
    "good, streamed": (JSON, b'{"prompt": "Hi", "max_tokens": 1, "stream": true}'),
    "other JSON type": ({"content-type": "Application/vnd.x+JSON; charset=utf-8"}, GOOD),
    "no type": ({}, GOOD),
    "text": ({"content-type": "text/plain"}, GOOD),
    "no subtype": ({"content-type": "application"}, GOOD),
    "empty": (JSON, b""),
    "no JSON": (JSON, b"{"),
    "no object": (JSON, b"[1]"),
    "null": (JSON, b"null"),
    "too deep": (JSON, b"[" * 100 + b"]" * 100),
    "not UTF-8": (JSON, b'{"prompt": "\xff"}'),
    "unknown field": (JSON, b'{"prompt": "Hi", "nothing": 1}'),
    "wrong type": (JSON, b'{"prompt": "Hi", "max_tokens": "1"}'),
    "missing": (JSON, b"{}"),
    "nested": (JSON, b'{"prompt": "Hi", "stream": true, "stream_options": {"include_usage": 1}}'),
    "unknown model": (JSON, b'{"prompt": "Hi", "model": "nobody"}'),
    "union": (JSON, b'{"prompt": {"a": 1}}'),
}


def answers(serve_script: Callable[..., AbstractContextManager[Scripted]], method: str = "POST") -> dict[str, object]:
    """What the application answers to each request, without what differs by chance."""
    with serve_script([[delta(0, [40], "length")]]) as scripted:
        client: TestClient = scripted.client
        found = {}
        for name, (headers, body) in REQUESTS.items():
            reply = client.request(method, "/v1/completions", headers=headers, content=body)
            text = re.sub(r'"(id|created)":("[^"]*"|\d+)', r'"\1":0', reply.text)
            found[name] = (reply.status_code, reply.headers["content-type"], text)
        return found


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes applications that have no short way."""

    def remove() -> None:
        class NoRoutes(DirectRoutes):
            def __init__(self, app: object, routers: list[APIRouter]) -> None:
                super().__init__(app, [])  # type: ignore[arg-type]

        monkeypatch.setattr(application, "DirectRoutes", NoRoutes)

    return remove


@pytest.mark.parametrize("method", ["POST", "GET", "PUT"])
def test_answers_are_those_of_fastapi(
    serve_script: Callable[..., AbstractContextManager[Scripted]], without: Callable[[], None], method: str
) -> None:
    direct = answers(serve_script, method)
    without()
    assert direct == answers(serve_script, method)
    if method == "POST":
        assert [direct[name][0] for name in ("good", "empty", "missing", "unknown model")] == [200, 400, 400, 404]


def test_the_routes_that_matter_are_direct() -> None:
    direct = DirectRoutes(lambda *_: None, application.ROUTERS)._routes  # type: ignore[arg-type, return-value]
    assert {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"} <= direct.keys()
    assert "/v1/models" not in direct
