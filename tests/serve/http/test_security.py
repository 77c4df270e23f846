"""A running server with keys, asked by those who should get nothing, too much, or too deep."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.routing import BaseRoute, Mount, Route

from strata.serve.http.app import build_app
from strata.serve.settings import ServeSettings
from strata.serve.state import ServerState
from tests.serve.running import Running, running, wait_for

KEY = "sk-alice-0123456789"
SECRET = "the-word-that-no-log-may-hold"

# What a model's author could write into a template: nothing of it may reach beyond the request that renders it.
HOSTILE = """
{%- set word = messages[0].content -%}
{%- if word == 'loop' -%}
    {%- for a in range(99999) -%}{%- for b in range(99999) -%}{%- endfor -%}{%- endfor -%}
{%- elif word == 'escape' -%}{{ ''.__class__.__mro__[1].__subclasses__() }}
{%- elif word == 'import' -%}{{ cycler.__init__.__globals__.os.system('true') }}
{%- elif word == 'grow' -%}{{ 'x' * 10 ** 10 }}
{%- else -%}<|user|>{{ word }}<|end|><|assistant|>{%- endif -%}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("server")
    (folder / "keys").write_text(f"alice:{KEY}\nbob:sk-bob-0123456789\n")
    (folder / "keys").chmod(0o600)
    (folder / "template").write_text(HOSTILE)
    arguments = ("--api-key-file", str(folder / "keys"), "--chat-template", str(folder / "template"))
    with running(*arguments, "--reasoning", "--tool-call-parser", "hermes", key=KEY) as started:
        yield started


def fault(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of a response, once it has the status and OpenAI's shape."""
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] is None or isinstance(error["code"], str)
    return error


def assert_serves(server: Running) -> None:
    assert server.complete(max_tokens=1).status_code == 200


# ---- keys ----


async def _nobody() -> ServerState:
    raise AssertionError("routes are read without a server")


def _calls(routes: Sequence[BaseRoute]) -> Iterator[tuple[str, str]]:
    """Method and path of every route; a parameter stands for itself."""
    for route in routes:
        if isinstance(route, Mount):
            yield "GET", f"{route.path}/anything"
        elif isinstance(route, Route):
            path = route.path.replace("{", "").replace("}", "").replace(":path", "")
            yield from ((method, path) for method in route.methods or {"GET"})
        else:  # FastAPI keeps a router that was included as it is
            yield from _calls(route.original_router.routes)  # type: ignore[attr-defined]


CALLS = sorted(set(_calls(build_app(ServeSettings("m", ("m",)), _nobody).routes)))


def test_the_route_table_is_read_whole() -> None:
    documented = build_app(ServeSettings("m", ("m",)), _nobody).openapi()["paths"]
    assert {path.replace("{", "").replace("}", "") for path in documented} < {path for _, path in CALLS}
    assert {("POST", "/v1/chat/completions"), ("GET", "/metrics"), ("GET", "/"), ("GET", "/docs")} <= set(CALLS)


def test_every_route_but_health_and_ready_needs_a_right_key(server: Running) -> None:
    for method, path in [
        *CALLS,
        ("GET", "/nowhere"),
        ("GET", "/health/"),
        ("GET", "/health%2f.."),
        ("PUT", "/v1/models"),
    ]:
        for headers in ({}, {"Authorization": "Bearer sk-wrong"}, {"Authorization": f"Bearer {KEY[:-1]}"}):
            response = httpx.request(method, server.url + path, headers=headers, content=b"{}", timeout=60)
            if path in ("/health", "/ready"):
                assert response.status_code in (200, 405)
            elif method == "HEAD":
                assert response.status_code == 401
            else:
                assert fault(response, 401)["code"] == "invalid_api_key", (method, path)


def test_callers_share_no_cached_prefix(server: Running) -> None:
    prompt = list(range(100, 164))

    def cached(key: str) -> int:
        response = server.http.post(
            "/v1/completions",
            json={"model": "builtin", "prompt": prompt, "max_tokens": 1},
            headers={"Authorization": f"Bearer {key}"},
        )
        tokens: int = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return tokens

    assert [cached(KEY), cached(KEY) > 0, cached("sk-bob-0123456789")] == [0, True, 0]


def test_the_log_holds_neither_keys_nor_prompts(server: Running) -> None:
    assert server.complete(prompt=SECRET, max_tokens=1).status_code == 200
    server.http.get(f"/v1/models?key={SECRET}")
    httpx.get(f"{server.url}/v1/models", headers={"Authorization": f"Bearer {SECRET}"})
    last = {"x-request-id": "the-last-of-these"}
    server.http.post("/v1/completions", content=f'{{"prompt": "{SECRET}", "no_such_field": 1}}', headers=last)
    wait_for(lambda: "the-last-of-these" in server.output(), server.output)
    assert "POST /v1/completions" in server.output()
    for secret in (KEY, SECRET):
        assert secret not in server.output()


# ---- sizes ----


def test_bodies_and_headers_are_bounded(server: Running) -> None:
    large = b'{"prompt": "' + b"x" * 2_200_000 + b'"}'
    fault(server.http.post("/v1/completions", content=large), 413)
    fault(server.http.post("/v1/completions", content=iter([large[:1_000_000], large[1_000_000:]])), 413)
    fault(server.http.get("/v1/models", headers={"x-large": "x" * 20_000}), 431)
    fault(server.http.get("/v1/models?" + "x" * 20_000), 431)
    fault(server.http.get("/v1/models", headers={f"x-{number}": "x" for number in range(120)}), 431)
    assert_serves(server)


# ---- grammars, templates, links ----


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}
    return schema


@pytest.mark.parametrize(
    ("schema", "statuses"),
    [
        (_nested(25), (200, 400)),
        (_nested(100), (400,)),
        ({"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(20_000)}}, (400,)),
        ({"type": "string", "pattern": "(((a{1,1000}){1,1000}){1,1000}){1,1000}"}, (200, 400)),
        ({"type": "string", "pattern": "(a?){1000}a{1000}"}, (200, 400)),
        ({"type": "string", "pattern": "(" * 1000}, (400,)),
        ({"$ref": "#"}, (400,)),
        ({"$ref": "https://evil.example/schema.json"}, (400,)),
        ({"enum": []}, (400,)),
    ],
)
def test_grammars_that_are_deep_large_or_wrong_cost_their_request_only(
    server: Running, schema: Any, statuses: tuple[int, ...]
) -> None:
    start = time.monotonic()
    body = {
        "model": "builtin",
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 4,
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}},
    }
    assert server.http.post("/v1/chat/completions", json=body).status_code in statuses
    assert time.monotonic() - start < 30
    assert_serves(server)


@pytest.mark.parametrize("word", ["loop", "escape", "import", "grow"])
def test_a_hostile_template_costs_its_request_only(server: Running, word: str) -> None:
    body = {"model": "builtin", "messages": [{"role": "user", "content": word}], "max_tokens": 1}
    start = time.monotonic()
    error = fault(server.http.post("/v1/chat/completions", json=body), 400)
    assert time.monotonic() - start < 30
    assert "subclasses" not in error["message"]
    assert_serves(server)
    body["messages"] = [{"role": "user", "content": "Hi"}]
    assert server.http.post("/v1/chat/completions", json=body).status_code == 200


def test_no_url_is_fetched(server: Running) -> None:
    content = [{"type": "image_url", "image_url": {"url": f"{server.url}/fetched"}}]
    body = {"model": "builtin", "messages": [{"role": "user", "content": content}], "max_tokens": 1}
    fault(server.http.post("/v1/chat/completions", json=body), 400)
    assert "/fetched" not in server.output()


def test_no_processes_or_files_are_left_by_all_that(server: Running) -> None:
    """What was killed for taking too long has been waited for, and its pipes are closed."""
    assert_serves(server)  # which opens the connection that the client keeps
    before = len(list(Path(f"/proc/{server.pid}/fd").iterdir()))
    for _ in range(3):
        assert_serves(server)
    states = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in server.children()]
    assert "Z" not in states
    wait_for(lambda: len(list(Path(f"/proc/{server.pid}/fd").iterdir())) <= before)
    assert before < 60
