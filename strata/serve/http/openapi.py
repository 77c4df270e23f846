"""The OpenAPI document (3.1) of the server, as FastAPI derives it, made true in what FastAPI cannot know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from strata.serve.http.gate import OPEN_PATHS

_KEY = "api_key"


def describe(app: FastAPI, streamed: Sequence[type[BaseModel]]) -> dict[str, Any]:
    """The document, made once. Invalid bodies are answered with 400 here, not with FastAPI's 422.

    streamed: what the events of streams hold, which `sse.streams` refers to.
    """
    if app.openapi_schema is not None:
        return app.openapi_schema
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    for path, operations in document["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            operation["security"] = [] if path in OPEN_PATHS else [{_KEY: []}, {}]
    components = document["components"]
    components["securitySchemes"] = {
        _KEY: {"type": "http", "scheme": "bearer", "description": "Only where the server has been given keys."}
    }
    for name in ("HTTPValidationError", "ValidationError"):
        components["schemas"].pop(name, None)
    _add_schemas(components["schemas"], streamed)
    _write_integers_whole(document)
    app.openapi_schema = document
    return document


def _add_schemas(schemas: dict[str, Any], models: Sequence[type[BaseModel]]) -> None:
    _, found = models_json_schema(
        [(model, "serialization") for model in models], ref_template="#/components/schemas/{model}"
    )
    for name, schema in found["$defs"].items():
        known = schemas.setdefault(name, schema)
        if known.get("properties", {}).keys() != schema.get("properties", {}).keys():
            raise ValueError(f"two models are called {name}: give one of them another name")


def _write_integers_whole(value: Any) -> None:
    """FastAPI writes the bounds of integers as floats."""
    if isinstance(value, dict):
        if value.get("type") == "integer":
            value.update({name: int(value[name]) for name in ("minimum", "maximum") if name in value})
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            _write_integers_whole(one)
