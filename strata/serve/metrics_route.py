"""`GET /metrics`: all series, for Prometheus and for the live page."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

router = APIRouter(tags=["observation"])


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(request: Request) -> Response:
    """Counters, gauges and histograms in Prometheus' text format."""
    server = request.app.state.server
    return Response(server.metrics.render(server.client.statistics), media_type=CONTENT_TYPE_PLAIN_0_0_4)
