"""What the handlers of one API process share; they reach it as `request.app.state.server`."""

from __future__ import annotations

from dataclasses import dataclass

from strata.models.tokenizer import Tokenizer
from strata.serve.client import EngineClient
from strata.serve.grammar import GrammarChecker
from strata.serve.limits import Limits
from strata.serve.metrics import Metrics
from strata.serve.response_store import ResponseStore
from strata.serve.settings import ServeSettings


@dataclass
class ServerState:
    """draining: no new requests are taken, those under way finish."""

    settings: ServeSettings
    client: EngineClient
    tokenizer: Tokenizer
    limits: Limits
    metrics: Metrics
    grammars: GrammarChecker
    responses: ResponseStore
    draining: bool = False
