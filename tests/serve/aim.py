"""Aims the cases of Schemathesis: makes them cheap, and those that the document allows such that they can be served."""

from __future__ import annotations

from typing import Any

from schemathesis import Case, HookContext

from tests.serve.live import NAME, LiveServer

MAX_TOKENS = 4
_LENGTHS = {
    "/v1/chat/completions": ("max_completion_tokens", "max_tokens"),
    "/v1/completions": ("max_tokens",),
    "/v1/responses": ("max_output_tokens",),
}
# A request has one of each two.
_APART = {
    "/v1/chat/completions": (
        ("max_completion_tokens", "max_tokens"),
        ("continue_final_message", "add_generation_prompt"),
    ),
    "/v1/completions": (("prompt_token_ids", "prompt"),),
    "/tokenize": (("messages", "prompt"), ("continue_final_message", "add_generation_prompt")),
}
# What the answer has to be is said by one field, and in vLLM's by one field of it.
_FORMS = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "response_format")
_STRUCTURED = ("json", "regex", "choice", "grammar", "json_object")
_OF_MESSAGES = (
    "continue_final_message",
    "add_generation_prompt",
    "chat_template_kwargs",
    "parse_special_tokens",
    "tools",
)
_IDS = ("prompt", "prompt_token_ids", "input", "tokens", "stop_token_ids")


class Aim:
    """The hook `map_case`.

    It mends what a schema does not tell: which models, token ids and stored responses there are, which fields go
    together, and that 1.0 is no integer here.
    """

    def __init__(self, server: LiveServer, headers: dict[str, str]) -> None:
        self._server = server
        self._headers = headers

    def __call__(self, context: HookContext, case: Case) -> Case:
        allowed = case.meta is not None and case.meta.generation.mode.is_positive
        if isinstance(case.body, dict):
            body = self._servable(case.path, case.body) if allowed else dict(case.body)
            case.body = _cheap(case.path, body)
        elif allowed and case.path_parameters and _every_second(case.path_parameters):
            case.path_parameters = {name: self._existing(name) for name in case.path_parameters}
        return case

    def _servable(self, path: str, given: dict[str, Any]) -> dict[str, Any]:
        body = _agreeing(path, _whole(given))
        if body.get("model") is not None:
            body["model"] = NAME
        if path == "/v1/responses":
            body["input"] = _called(body["input"])
        for name in _IDS:
            if name in body:
                body[name] = self._known(body[name])
        if body.get("logit_bias"):
            body["logit_bias"] = {str(self._known(int(id))): bias for id, bias in body["logit_bias"].items()}
        return body

    def _known(self, value: Any) -> Any:
        """Token ids, in whatever lists, that the model has."""
        if isinstance(value, list):
            return [self._known(one) for one in value]
        return value % self._server.state.client.ready.vocab_size if type(value) is int else value

    def _existing(self, name: str) -> str:
        if name == "model":
            return NAME
        request = {"input": "Hi", "max_output_tokens": 1}
        identity: str = self._server.client.post("/v1/responses", json=request, headers=self._headers).json()["id"]
        return identity


def _agreeing(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """With fields that go together; every second answer is streamed."""
    for name, other in _APART.get(path, ()):
        if body.get(name) is not None:
            body.pop(other, None)
        elif other == "prompt" and body.get(other) is None:
            body[other] = "Hi"
    if path == "/tokenize" and body.get("messages") is None:
        body = {name: value for name, value in body.items() if name not in _OF_MESSAGES}
    if isinstance(body.get("structured_outputs"), dict):
        body["structured_outputs"] = _structured(body["structured_outputs"])
    body = _only_first(body, _FORMS)
    if not body.get("tools"):
        body.pop("tool_choice", None)
    if body.get("max_tokens") == 0 and path == "/v1/completions":
        body["echo"] = True
    if body.get("stream_options") is not None or (path in _LENGTHS and _every_second(body)):
        body["stream"] = True
    if body.get("top_logprobs") is not None:
        body |= {"include": ["message.output_text.logprobs"]} if path == "/v1/responses" else {"logprobs": True}
    return body


def _structured(given: dict[str, Any]) -> dict[str, Any]:
    one = _only_first(given, _STRUCTURED)
    return one if any(name in one for name in _STRUCTURED) else {**one, "json_object": True}


def _only_first(body: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Without those of the names that come after one which asks for something; none of `names` is left if none does."""
    asking = [name for name in names if body.get(name) not in (None, False)]
    return {name: value for name, value in body.items() if name not in names or name in asking[:1]}


def _every_second(value: Any) -> bool:
    """Of many values about half, the same ones each time."""
    return len(repr(value)) % 2 == 0


def _cheap(path: str, body: dict[str, Any]) -> dict[str, Any]:
    lengths = _LENGTHS.get(path, ())
    if lengths and all(body.get(name) is None for name in lengths):
        body[lengths[0]] = MAX_TOKENS
    most = MAX_TOKENS
    for name in (*lengths, "min_tokens"):
        if type(body.get(name)) is int and 0 <= body[name] < 2**31:
            most = body[name] = min(body[name], most)
    return body


def _called(items: Any) -> Any:
    """With a call before each output, which has to be of one."""
    if not isinstance(items, list):
        return items
    called = []
    for item in items:
        if item.get("type") == "function_call_output":
            called.append({"type": "function_call", "call_id": item["call_id"], "name": "f", "arguments": "{}"})
        called.append(item)
    return called


def _whole(value: Any) -> Any:
    """The same with 1 for 1.0, which JSON schema takes for an integer."""
    if isinstance(value, dict):
        return {key: _whole(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_whole(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
