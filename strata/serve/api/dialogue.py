"""What chat completions and responses do alike: from a checked conversation to a generation and its parsers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import Request

from strata.serve.admission import admit_generation
from strata.serve.api.prompts import Prompt, bad_words_of
from strata.serve.generation import EngineRequest
from strata.serve.grammar import Grammar
from strata.serve.http.limits import AdmittedRequest
from strata.serve.replies.reasoning import opens_reasoning
from strata.serve.replies.reply_parser import ReplyParser, with_visible_tags
from strata.serve.replies.tools import use_tools
from strata.serve.schema.chat import ChatRequest
from strata.serve.schema.responses import ResponsesRequest
from strata.serve.schema.sampling import sampling_params
from strata.serve.state import server_of

Tools = list[dict[str, Any]] | None


async def parse_dialogue(
    body: ChatRequest | ResponsesRequest,
    request: Request,
    answer: Callable[[], Grammar | None],
    render: Callable[[AdmittedRequest, Tools], Awaitable[Prompt]],
) -> tuple[EngineRequest, list[ReplyParser]]:
    """A request, let in, and a parser for each sample of the reply. Raises ApiError for what cannot be served.

    answer: tells what an answer that calls nothing must follow, if anything. render: makes the prompt, with tools for
        the chat template.
    """
    state = server_of(request)
    params = sampling_params(
        body, state.client.ready, max_tokens=body.requested_max_tokens, logprobs=body.reported_logprobs
    )
    admission = admit_generation(request, params, priority=body.priority)
    tools = use_tools(
        body.offered,
        body.tool_choice,
        parallel=body.parallel_tool_calls is not False,
        tool_format=state.settings.tool_format,
        answer=answer(),
    )
    if tools.grammar is not None:
        await state.grammars.check(tools.grammar, admission)
    prompt = await render(admission, tools.shown)
    reasoning = state.settings.reasoning and tools.grammar is None  # a grammar leaves no room for it
    params = with_visible_tags(params, state.tokenizer, tools.tool_format, reasoning)
    bad_words = await bad_words_of(state, admission, params)
    opened = opens_reasoning(prompt.text)
    parsers = [
        ReplyParser(tools.tool_format, reasoning, in_reasoning=opened, parallel=tools.parallel) for _ in range(params.n)
    ]
    grammar = None if tools.grammar is None else tools.grammar.text
    return EngineRequest(prompt.ids, params, bad_words, grammar), parsers
