"""`GET /metrics`: all series, for Prometheus and for the live page."""

from __future__ import annotations

from fastapi import Request, Response
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from strata.serve.http.json_route import api_router
from strata.serve.state import ServerState

router = api_router("observation")


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(request: Request) -> Response:
    """Counters, gauges and histograms in Prometheus' text format."""
    state: ServerState = request.app.state.server
    return Response(state.metrics.render(*state.client.each_statistics), media_type=CONTENT_TYPE_PLAIN_0_0_4)
