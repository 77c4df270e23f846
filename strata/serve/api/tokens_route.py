"""/tokenize and /detokenize: what the model makes of a text or of messages, and back; the shapes are vLLM's."""

from __future__ import annotations

from typing import Annotated

from fastapi import Request, Response
from pydantic import Field

from strata.serve.admission import admit
from strata.serve.api.prompts import chat_prompt, encode, off_the_loop
from strata.serve.http.errors import ApiError
from strata.serve.http.routes import api_router, json_response
from strata.serve.schema.base import ReplyModel, RequestModel
from strata.serve.schema.chat import MAX_TOOLS, Tool
from strata.serve.schema.messages import Message, TemplateFields, as_sent
from strata.serve.schema.sampling import TokenId, check_ids
from strata.serve.state import received

router = api_router("tokens")


class TokenizeRequest(TemplateFields):
    """Either a prompt or messages."""

    model: str | None = None
    """One of /v1/models; absent, the first of them."""
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    """Add what the tokenizer puts around a text: by default to a prompt, not to messages, whose template does it."""
    return_token_strs: bool | None = None
    """Tell the tokens as the vocabulary writes them, too."""
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    """Functions that are shown to the model with the messages."""

    def check(self) -> None:
        """Raises ApiError (400) for fields that do not go together."""
        if (self.prompt is None) == (self.messages is None):
            raise ApiError(400, "give either prompt or messages", param="prompt")
        of_messages = (
            "add_generation_prompt",
            "continue_final_message",
            "chat_template_kwargs",
            "tools",
            "parse_special_tokens",
        )
        alone = next((name for name in of_messages if getattr(self, name) is not None), None)
        if self.messages is None and alone is not None:
            raise ApiError(400, f"{alone} is only for requests with messages", param=alone)
        self.check_template()


class Tokenized(ReplyModel):
    """max_model_len: most tokens of prompt and output together. token_strs: null unless asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(RequestModel):
    model: str | None = None
    """One of /v1/models; absent, the first of them."""
    tokens: list[TokenId]


class Detokenized(ReplyModel):
    prompt: str


@router.post("/tokenize", response_model=Tokenized)
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """The token ids of a prompt or of messages."""
    state = received(request, "tokenize")
    state.model_name(body.model)
    body.check()
    admission = admit(request)
    if body.prompt is not None:
        add = body.add_special_tokens is not False
        tokens = await encode(state, admission, body.prompt, add_special_tokens=add)
    else:
        prompt = await chat_prompt(
            state,
            admission,
            as_sent(body.messages or ()),
            add_special_tokens=bool(body.add_special_tokens),
            **body.rendering([tool.function.tool for tool in body.tools or ()]),
        )
        tokens = prompt.ids
    admission.add_prompt(len(tokens))

    def written() -> Response:
        strings = [state.tokenizer.token(id) for id in tokens] if body.return_token_strs else None
        most = state.client.ready.max_model_len
        return json_response({"count": len(tokens), "max_model_len": most, "tokens": tokens, "token_strs": strings})

    return await off_the_loop(state, admission, len(tokens), written)


@router.post("/detokenize", response_model=Detokenized)
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """The text of token ids, special tokens included."""
    state = received(request, "detokenize")
    state.model_name(body.model)
    check_ids(body.tokens, state.client.ready.vocab_size, "tokens")
    admission = admit(request)
    admission.add_prompt(len(body.tokens))

    def decoded() -> str:
        return state.tokenizer.decode(body.tokens, skip_special_tokens=False)

    return json_response({"prompt": await off_the_loop(state, admission, len(body.tokens), decoded)})
