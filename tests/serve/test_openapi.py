"""The OpenAPI document: complete, true to what the server answers, and no input that it describes brings a 5xx."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

import strata
from strata.serve.app import build_app
from strata.serve.schema_chat import ChatRequest
from strata.serve.settings import ServeSettings
from strata.serve.state import ServerState
from tests.serve.live import LiveServer, live_server

EXAMPLES = 25
CHECKS = [not_a_server_error, response_schema_conformance, content_type_conformance, status_code_conformance]


BUILTIN = Path(strata.__file__).parent / "models" / "builtin"


async def _never() -> ServerState:
    raise NotImplementedError


DOCUMENT = build_app(ServeSettings("", ("",)), _never).openapi()

api = schemathesis.openapi.from_dict(DOCUMENT)
api.config.generation.modes = list(schemathesis.GenerationMode)  # what the document allows, and what it forbids


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    """Its answers are short, unless they are asked for otherwise."""
    with live_server(BUILTIN, engine_options={"max_model_len": 128}, tool_format="hermes") as server:
        yield server


@api.parametrize()
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
def test_answers_are_as_documented(case: schemathesis.Case, server: LiveServer) -> None:
    case.call_and_validate(base_url=server.url, checks=CHECKS)


def test_the_server_has_nothing_left_to_do(server: LiveServer) -> None:
    server.wait_until(lambda: server.idle)


def test_the_document_is_the_one_that_is_served(server: LiveServer) -> None:
    assert server.client.get("/openapi.json").json() == DOCUMENT


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
