"""The OpenAPI document is complete, and routes that are called directly answer as FastAPI's do."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fastapi import APIRouter, Request
from starlette.testclient import TestClient

from strata.files.strict_json import read_json
from strata.serve.http import app as application
from strata.serve.http.app import build_app
from strata.serve.http.direct_routes import DirectRoutes
from strata.serve.schema.chat import ChatRequest
from strata.serve.settings import ServeSettings
from strata.serve.state import ServerState
from tests.serve.scripted import Serve, delta


async def _never() -> ServerState:
    raise NotImplementedError


DOCUMENT = build_app(ServeSettings("", ("",)), _never).openapi()


def operations() -> Iterator[tuple[str, Any]]:
    for path, methods in DOCUMENT["paths"].items():
        for operation in methods.values():
            yield path, operation


def test_each_operation_tells_its_errors() -> None:
    for path, operation in operations():
        assert {"200", "400", "401", "429", "500", "503", "default"} <= set(operation["responses"]), path
        assert "422" not in operation["responses"]
        for status, response in operation["responses"].items():
            if status != "200":
                assert response["content"]["application/json"]["schema"]["$ref"].endswith("/ErrorBody")


def test_each_operation_but_health_asks_for_a_key() -> None:
    assert DOCUMENT["components"]["securitySchemes"]["api_key"]["scheme"] == "bearer"
    open_paths = {path for path, operation in operations() if not operation["security"]}
    assert open_paths == {"/health", "/ready"}


def test_operations_have_names_of_their_own() -> None:
    names = [operation["operationId"] for _, operation in operations()]
    assert len(set(names)) == len(names)


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from (one for key, one in value.items() if key == "$ref" and isinstance(one, str))
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from references(one)


def test_what_it_refers_to_is_there() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    found = {reference.rpartition("/")[2] for reference in references(DOCUMENT)}
    assert found <= set(schemas)
    assert {"ChatChunk", "Completion", "ResponseStreamEvent", "ErrorBody"} <= found


def test_fields_explain_themselves() -> None:
    """Each has a description, but for those that need none beside OpenAI's."""
    properties = DOCUMENT["components"]["schemas"]["ChatRequest"]["properties"]
    assert set(properties) == set(ChatRequest.model_fields)
    assert {name for name, field in properties.items() if "description" not in field} <= {"messages"}


def test_bounds_are_those_that_hold() -> None:
    properties = DOCUMENT["components"]["schemas"]["CompletionRequest"]["properties"]
    samples, seed, bias = (properties[name]["anyOf"][0] for name in ("n", "seed", "logit_bias"))
    assert repr(samples["maximum"]) == "16"  # an integer's bound is no float
    assert seed == {"type": "integer", "format": "int64"}  # as a float, 2**63 - 1 would be another number
    assert bias["additionalProperties"] is False  # beside the keys that its pattern takes


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


def answers(serve_script: Serve, method: str = "POST") -> dict[str, object]:
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
    """Makes applications that have no short way, where FastAPI reads JSON as strictly as on it."""

    async def strict(request: Request) -> Any:
        return read_json(await request.body())

    def remove() -> None:
        monkeypatch.setattr(Request, "json", strict)

        class NoRoutes(DirectRoutes):
            def __init__(self, app: object, routers: list[APIRouter]) -> None:
                super().__init__(app, [])  # type: ignore[arg-type]

        monkeypatch.setattr(application, "DirectRoutes", NoRoutes)

    return remove


@pytest.mark.parametrize("method", ["POST", "GET", "PUT"])
def test_answers_are_those_of_fastapi(serve_script: Serve, without: Callable[[], None], method: str) -> None:
    direct = answers(serve_script, method)
    without()
    assert direct == answers(serve_script, method)
    if method == "POST":
        assert [direct[name][0] for name in ("good", "empty", "missing", "unknown model")] == [200, 400, 400, 404]


def test_the_routes_that_matter_are_direct() -> None:
    direct = DirectRoutes(lambda *_: None, application.ROUTERS)._routes  # type: ignore[arg-type, return-value]
    assert {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"} <= direct.keys()
    assert "/v1/models" not in direct
