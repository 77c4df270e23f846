"""The OpenAPI document: complete, and with all that it refers to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from strata.serve.http.app import build_app
from strata.serve.schema.chat import ChatRequest
from strata.serve.settings import ServeSettings
from strata.serve.state import ServerState


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
