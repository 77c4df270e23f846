"""Replies with reasoning and tool calls: whole and streamed token by token, they say the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

from strata.engine.process.messages import TokenLogprobs
from strata.text.tokenizer import Tokenizer
from tests.serve.scripted import EOS, Scripted, delta

ServeScript = Callable[..., AbstractContextManager[Scripted]]

TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("one", "two")]
CALLS = '<tool_call>\n{"name": "one", "arguments": {"a": "é🙂"}}\n</tool_call>\n' * 2
THOUGHT = "<think>\nHm, 4 < 5.\n</think>\n\n"


def script(tokenizer: Tokenizer, text: str, reason: str = "stop") -> list[Any]:
    ids = tokenizer.encode(text, add_special_tokens=False)
    return [*([delta(0, [id])] for id in ids), [delta(0, [EOS], reason)]]


def both(server: Scripted, **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The whole message, with its finish reason, and the same put together from a stream."""
    choice = server.chat(**fields)["choices"][0]
    whole = {"finish_reason": choice["finish_reason"], **choice["message"]}
    streamed: dict[str, Any] = {"role": None, "content": "", "reasoning_content": "", "tool_calls": []}
    for chunk in server.stream_chat(**fields)[:-1]:
        (part,) = chunk["choices"]
        change = part["delta"]
        streamed["role"] = change.get("role", streamed["role"])
        for name in ("content", "reasoning_content"):
            streamed[name] += change.get(name) or ""
        for call in change.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(streamed["tool_calls"])
                streamed["tool_calls"].append(
                    {"id": call["id"], "type": call["type"], "function": dict(call["function"])}
                )
            else:
                streamed["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        streamed["finish_reason"] = part["finish_reason"]
    return whole, streamed


def functions(message: dict[str, Any]) -> list[tuple[str, Any]]:
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return [(call["name"], json.loads(call["arguments"])) for call in calls]


@pytest.mark.parametrize("parallel", [True, False])
def test_calls(serve_script: ServeScript, tokenizer: Tokenizer, parallel: bool) -> None:
    with serve_script(script(tokenizer, "Let me see. " + CALLS), settings={"tool_format": "hermes"}) as server:
        whole, streamed = both(server, tools=TOOLS, parallel_tool_calls=parallel)
    expected = [("one", {"a": "é🙂"})] * (2 if parallel else 1)
    assert functions(whole) == functions(streamed) == expected
    assert whole["content"].strip() == streamed["content"].strip() == "Let me see."
    assert whole["finish_reason"] == streamed["finish_reason"] == "tool_calls"
    assert len({call["id"] for call in whole["tool_calls"]}) == len(expected)


def test_a_call_alone_has_no_content(serve_script: ServeScript, tokenizer: Tokenizer) -> None:
    with serve_script(script(tokenizer, CALLS), settings={"tool_format": "hermes"}) as server:
        whole, _ = both(server, tools=TOOLS)
    assert whole["content"] is None


def test_a_call_that_was_cut_is_no_tool_calls(serve_script: ServeScript, tokenizer: Tokenizer) -> None:
    with serve_script(script(tokenizer, CALLS, "length"), settings={"tool_format": "hermes"}) as server:
        whole, streamed = both(server, tools=TOOLS)
    assert whole["finish_reason"] == streamed["finish_reason"] == "length"


def test_without_tools_a_call_is_text(serve_script: ServeScript, tokenizer: Tokenizer) -> None:
    with serve_script(script(tokenizer, CALLS), settings={"tool_format": "hermes"}) as server:
        for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            whole, streamed = both(server, **fields)
            assert whole["content"] == streamed["content"] == CALLS
            assert whole["finish_reason"] == "stop"


def test_reasoning(serve_script: ServeScript, tokenizer: Tokenizer) -> None:
    with serve_script(script(tokenizer, THOUGHT + "Yes."), settings={"reasoning": True}) as server:
        whole, streamed = both(server)
    for message in (whole, streamed):
        assert (message["reasoning_content"], message["content"]) == ("Hm, 4 < 5.", "Yes.")
        assert message["finish_reason"] == "stop"


def test_reasoning_is_content_where_it_is_not_split_off(serve_script: ServeScript, tokenizer: Tokenizer) -> None:
    with serve_script(script(tokenizer, THOUGHT + "Yes.")) as server:
        whole, streamed = both(server)
    assert whole["content"] == streamed["content"] == THOUGHT + "Yes."
    assert "reasoning_content" not in whole


def test_reasoning_before_calls(serve_script: ServeScript, tokenizer: Tokenizer) -> None:
    settings = {"reasoning": True, "tool_format": "hermes"}
    with serve_script(script(tokenizer, THOUGHT + CALLS), settings=settings) as server:
        whole, streamed = both(server, tools=TOOLS)
    for message in (whole, streamed):
        assert message["reasoning_content"] == "Hm, 4 < 5."
        assert len(functions(message)) == 2
        assert message["finish_reason"] == "tool_calls"


def test_log_probabilities_of_a_call_are_all_told(serve_script: ServeScript, tokenizer: Tokenizer) -> None:
    """Those of tokens that show nothing, such as the tags, go with the next chunk."""
    ids = tokenizer.encode(CALLS, add_special_tokens=False)
    entries = [delta(0, [id], logprobs=[TokenLogprobs(id, -1.0, 1, [], [])]) for id in ids]
    last = delta(0, [EOS], "stop", logprobs=[TokenLogprobs(EOS, -1.0, 1, [], [])])
    with serve_script([*([one] for one in entries), [last]], settings={"tool_format": "hermes"}) as server:
        stream = server.stream_chat(tools=TOOLS, logprobs=True)
    told = [choice["logprobs"] for chunk in stream[:-1] for choice in chunk["choices"] if choice["logprobs"]]
    raw = bytes(byte for part in told for entry in part["content"] for byte in entry["bytes"])
    assert raw.decode() == CALLS + "<|end|>"
