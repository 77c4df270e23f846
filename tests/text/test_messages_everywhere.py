"""A conversation is the same to a template whoever hands it over: chats and responses of a server, LLM.chat, training
data. What it is then is what transformers makes of the same messages, written by hand as templates expect them."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from strata import LLM
from strata.text.tokenizer import Tokenizer
from strata.train.data.records import encode_record
from tests.serve.scripted import Scripted, delta, scripted_server
from tests.text.published_templates import TEMPLATES

Messages = list[dict[str, Any]]


class Conversation(NamedTuple):
    """given: as clients and data sets have it; its last turn is the assistant's. meant: as templates expect it."""

    given: Messages
    meant: Messages
    tools: list[dict[str, Any]] | None = None


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
# As OpenAI's clients send it; and what a template is shown of a function of which no more is said.
ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA, "strict": True}}
NOW = {"type": "function", "function": {"name": "now", "description": None}}
SHOWN = [
    {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}},
    {
        "type": "function",
        "function": {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}},
    },
]


def said(role: str, content: Any = None, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def call(arguments: Any, name: str = "add") -> dict[str, Any]:
    return {"id": "callabc12", "type": "function", "function": {"name": name, "arguments": arguments}}


def result(content: Any) -> dict[str, Any]:
    return said("tool", content, tool_call_id="callabc12")


ASKED, ENDED = said("user", "What is 47 + 38?"), said("assistant", "It is 85 — ü.")
AGAIN = said("user", "Sure?")
CONVERSATIONS = {
    "plain": Conversation([ASKED, ENDED], [ASKED, ENDED]),
    "parts": Conversation(
        [said("user", parts("What is", "47 + 38?")), said("assistant", parts("It is", "85.")), AGAIN, ENDED],
        [said("user", "What is\n47 + 38?"), said("assistant", "It is\n85."), AGAIN, ENDED],
    ),
    "system": Conversation(
        [said("system", parts("Be brief.", "Be kind.")), ASKED, ENDED],
        [said("system", "Be brief.\nBe kind."), ASKED, ENDED],
    ),
    "developer": Conversation(
        [said("developer", "Be brief."), ASKED, ENDED],
        [said("system", "Be brief."), ASKED, ENDED],
    ),
    "empty lists": Conversation(
        [said("user", []), said("assistant", [], tool_calls=[]), AGAIN, said("assistant", "85.", tool_calls=[])],
        [said("user", ""), said("assistant", ""), AGAIN, said("assistant", "85.")],
    ),
    "null and no call": Conversation(
        [ASKED, said("assistant", None), AGAIN, ENDED],
        [ASKED, said("assistant", ""), AGAIN, ENDED],
    ),
    "call": Conversation(
        [ASKED, said("assistant", None, tool_calls=[call('{"b": 38, "a": 47}')]), result("85"), ENDED],
        [ASKED, said("assistant", "", tool_calls=[call({"b": 38, "a": 47})]), result("85"), ENDED],
        [ADD, NOW],
    ),
    "call and parts": Conversation(
        [
            said("developer", "Be brief."),
            ASKED,
            said("assistant", parts("Let me", "see."), tool_calls=[call('{"a": "é", "b": [1, {"c": null}]}')]),
            result(parts("85", "86")),
            ENDED,
        ],
        [
            said("system", "Be brief."),
            ASKED,
            said("assistant", "Let me\nsee.", tool_calls=[call({"a": "é", "b": [1, {"c": None}]})]),
            result("85\n86"),
            ENDED,
        ],
        [ADD],
    ),
    "two calls, one without arguments": Conversation(
        [
            ASKED,
            said("assistant", [], tool_calls=[call("", "now"), call('{"a": 1.5}')]),
            result("noon"),
            result([]),
            ENDED,
        ],
        [
            ASKED,
            said("assistant", "", tool_calls=[call({}, "now"), call({"a": 1.5})]),
            result("noon"),
            result(""),
            ENDED,
        ],
        [ADD, NOW],
    ),
    "arguments that are no object": Conversation(
        [ASKED, said("assistant", None, tool_calls=[call('{"a": 4')]), result("no"), ENDED],
        [ASKED, said("assistant", "", tool_calls=[call('{"a": 4')]), result("no"), ENDED],
        [ADD],
    ),
    "reasoning": Conversation(
        [ASKED, said("assistant", "85.", reasoning_content="40 + 30"), AGAIN, ENDED | {"reasoning_content": "Yes."}],
        [
            ASKED,
            said("assistant", "85.", reasoning_content="40 + 30", thinking="40 + 30"),
            AGAIN,
            ENDED | {"reasoning_content": "Yes.", "thinking": "Yes."},
        ],
    ),
    "reasoning by other names": Conversation(
        [
            ASKED,
            said("assistant", reasoning="Hm.", tool_calls=[call("{}", "now")]),
            result("noon"),
            ENDED | {"thinking": "Yes.", "reasoning": ""},
        ],
        [
            ASKED,
            said("assistant", "", reasoning_content="Hm.", thinking="Hm.", tool_calls=[call({}, "now")]),
            result("noon"),
            ENDED | {"reasoning_content": "Yes.", "thinking": "Yes."},
        ],
        [NOW],
    ),
    "refusals": Conversation(
        [
            ASKED,
            said("assistant", [{"type": "refusal", "refusal": "I cannot"}, {"type": "text", "text": "count."}]),
            AGAIN,
            said("assistant", [], refusal="No."),
        ],
        [ASKED, said("assistant", "I cannot\ncount."), AGAIN, said("assistant", "No.")],
    ),
    "reasoning before a call": Conversation(
        [ASKED, said("assistant", reasoning_content="Hm.", tool_calls=[call("{}", "now")]), result("noon"), ENDED],
        [
            ASKED,
            said("assistant", "", reasoning_content="Hm.", thinking="Hm.", tool_calls=[call({}, "now")]),
            result("noon"),
            ENDED,
        ],
        [NOW],
    ),
}


@pytest.fixture(scope="module")
def tokenizers(folder: Path) -> Iterator[dict[str, Tokenizer]]:
    made = {name: Tokenizer.load(folder, template) for name, template in TEMPLATES.items()}
    yield made
    for tokenizer in made.values():
        tokenizer.close()


@pytest.fixture(scope="module")
def server(tokenizers: dict[str, Tokenizer]) -> Iterator[Scripted]:
    """The template is that of `server.state.tokenizer`."""
    first = next(iter(tokenizers.values()))
    with scripted_server(first, [[delta(0, [], "stop")]], settings={"tool_format": "hermes"}) as server:
        server.engine.ready = msgspec.structs.replace(server.engine.ready, max_model_len=10_000)
        yield server


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def wanted(theirs: Any, template: str, meant: Messages, tools: Any, *, prompt: bool) -> str | None:
    """What transformers renders; None if the template refuses that or fails."""
    if template == TEMPLATES["deepseek"]:
        meant = with_arguments_as_text(meant)
    shown = [one for one in SHOWN if one["function"]["name"] in {tool["function"]["name"] for tool in tools or ()}]
    try:
        text = theirs.apply_chat_template(
            meant, tools=shown or None, chat_template=template, add_generation_prompt=prompt, tokenize=False
        )
    except Exception:
        return None
    return str(text)


def with_arguments_as_text(messages: Messages) -> Messages:
    """The same for a template that adds arguments to a text, where transformers needs one."""
    messages = copy.deepcopy(messages)
    for function in (call["function"] for message in messages for call in message.get("tool_calls", ())):
        if not isinstance(function["arguments"], str):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return messages


def asked(server: Scripted, path: str, body: dict[str, Any]) -> list[int] | None:
    """The prompt that the engine gets; None if the request is refused because of the template."""
    server.engine.added.clear()
    answer = server.client.post(path, json=body)
    if answer.status_code == 400 and answer.json()["error"]["code"] == "chat_template_failed":
        return None
    assert answer.status_code == 200, answer.text
    return list(server.engine.added[0].prompt)


def items(messages: Messages) -> list[dict[str, Any]]:
    """The messages as input of /v1/responses."""
    listed: list[dict[str, Any]] = []
    for message in messages:
        role, content = message["role"], copy.deepcopy(message["content"])
        for part in content if isinstance(content, list) else ():
            if part["type"] == "text":
                part["type"] = "output_text" if role == "assistant" else "input_text"
        if role == "tool":
            listed.append({"type": "function_call_output", "call_id": message["tool_call_id"], "output": content})
            continue
        if reasoning := message.get("reasoning_content") or message.get("reasoning"):
            listed.append({"type": "reasoning", "content": [{"type": "reasoning_text", "text": reasoning}]})
        calls = message.get("tool_calls") or ()
        if content is not None or not calls:
            listed.append({"role": role, "content": content or []})
        for one in calls:
            listed.append({"type": "function_call", "call_id": one["id"], **one["function"]})
    return listed


@pytest.mark.parametrize("conversation", CONVERSATIONS.values(), ids=CONVERSATIONS.keys())
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_is_the_same_everywhere(
    name: str,
    conversation: Conversation,
    server: Scripted,
    tokenizers: dict[str, Tokenizer],
    theirs: Any,
    engine: Callable[..., LLM],
) -> None:
    given, meant, tools = conversation
    before = copy.deepcopy(given)
    template, tokenizer = TEMPLATES[name], tokenizers[name]
    server.state.tokenizer = tokenizer
    text = wanted(theirs, template, meant[:-1], tools, prompt=True)
    ids = None if text is None else tokenizer.encode(text, add_special_tokens=False)

    offered = {} if tools is None else {"tools": tools}
    assert asked(server, "/v1/chat/completions", {"messages": given[:-1], **offered}) == ids
    flat = {} if tools is None else {"tools": [{"type": "function", **tool["function"]} for tool in tools]}
    assert asked(server, "/v1/responses", {"input": items(given[:-1]), "store": False, **flat}) == ids

    llm = engine(dtype="float32")
    record = {"messages": given, "tools": tools}
    if ids is None:
        with pytest.raises(ValueError, match="chat template failed"):
            llm.chat_prompt(given[:-1], tools=tools, chat_template=template)
        with pytest.raises(ValueError, match="chat template failed"):
            encode_record(tokenizer, "chat", record)
    else:
        assert llm.chat_prompt(given[:-1], tools=tools, chat_template=template) == {
            "prompt": text,
            "prompt_token_ids": ids,
        }
        last = encode_record(tokenizer, "chat", record)[-1]
        whole = wanted(theirs, template, meant, tools, prompt=False)
        assert whole is not None
        assert last.tokens.tolist() == tokenizer.encode(whole, add_special_tokens=False)
        # What is learned last begins where the prompt ends.
        begins = np.flatnonzero(np.diff(last.loss_mask.astype(int)) == 1)[-1] + 1
        assert begins == len(ids)
        assert last.tokens[:begins].tolist() == ids
    assert given == before


def test_each_template_shows_most_of_them(theirs: Any) -> None:
    """So that the test above compares texts, and not refusals."""
    for template in TEMPLATES.values():
        shown = [wanted(theirs, template, one.meant, one.tools, prompt=False) for one in CONVERSATIONS.values()]
        assert sum(text is not None for text in shown) >= 5
