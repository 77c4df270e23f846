"""What all routes of the API have in common."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Response

from strata.serve.http.errors import ERROR_RESPONSES


def api_router(tag: str) -> APIRouter:
    """A router of API routes: all the errors that any of them may answer with are documented."""
    return APIRouter(tags=[tag], responses=ERROR_RESPONSES)


def json_response(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
