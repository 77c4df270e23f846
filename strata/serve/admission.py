"""A request is let in before anything costly is done for it: by its size, by what it asks for, by whose it is."""

from __future__ import annotations

from fastapi import Request

from strata.engine.sampling_params import SamplingParams
from strata.serve.http.errors import ApiError
from strata.serve.http.limits import AdmittedRequest
from strata.serve.state import caller_of, server_of

# Of English text, and of JSON lists of ids, about so many make a token; the true number is settled later.
_BYTES_PER_TOKEN = 4


def admit(request: Request, *, token_limit: int = 0, sequences: int = 1, requests: int = 1) -> AdmittedRequest:
    """Let a request in, until it is over. Parameters and errors as of `Limits.admit`."""
    limits = server_of(request).limits
    admission = limits.admit(
        caller_of(request),
        prompt_tokens(request),
        token_limit,
        sequences,
        requests=requests,
        arrival=request.scope["state"]["arrival"],
    )
    request.scope["state"]["admission"] = admission
    return admission


def admit_generation(
    request: Request, params: SamplingParams, *, prompts: int = 1, priority: int | None = None
) -> AdmittedRequest:
    """Let a request in that generates from so many prompts. Raises ApiError: as `admit`, and 403 for its priority."""
    state = server_of(request)
    state.require_serving()
    if priority is not None and priority < 0 and caller_of(request).name not in state.settings.priority_keys:
        message = "this key may not put its requests first: leave priority out, or have --priority-keys name the key"
        raise ApiError(403, message, param="priority", code="priority_not_allowed")
    most = params.max_tokens
    if most is None:
        most = max(1, state.client.ready.max_model_len - prompt_tokens(request) // prompts)
    return admit(request, token_limit=most, sequences=prompts * params.n, requests=prompts)


def prompt_tokens(request: Request) -> int:
    """An estimate of what the body holds."""
    return max(1, int(request.scope["state"]["body_bytes"]) // _BYTES_PER_TOKEN)
