"""/tokenize and /detokenize."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

from strata.text.tokenizer import Tokenizer
from tests.serve.conftest import BUILTIN
from tests.serve.scripted import Scripted

Serve = Callable[..., AbstractContextManager[Scripted]]

MESSAGES = [{"role": "user", "content": "Hi"}]


def post(served: Scripted, path: str, status: int = 200, **body: Any) -> Any:
    response = served.client.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json()


def test_a_prompt_becomes_ids_and_they_become_it_again(serve_script: Serve, tokenizer: Tokenizer) -> None:
    text = "Größe: 東京 🙂 " * 300  # long enough for a thread
    with serve_script([]) as served:
        plain = post(served, "/tokenize", prompt=text, add_special_tokens=False)
        special = post(served, "/tokenize", prompt=text)
        assert post(served, "/detokenize", tokens=plain["tokens"]) == {"prompt": text}
        assert post(served, "/detokenize", tokens=special["tokens"]) == {"prompt": f"<|begin|>{text}"}
    assert plain == {
        "tokens": tokenizer.encode(text, add_special_tokens=False),
        "count": len(plain["tokens"]),
        "max_model_len": 1024,
        "token_strs": None,
    }
    assert special["tokens"] == [tokenizer.bos_id, *plain["tokens"]]


def test_messages_become_what_a_chat_would_be(serve_script: Serve, tokenizer: Tokenizer) -> None:
    with serve_script([]) as served:
        open_end = post(served, "/tokenize", messages=MESSAGES, return_token_strs=True)
        closed = post(served, "/tokenize", messages=MESSAGES, add_generation_prompt=False)
        continued = post(served, "/tokenize", messages=MESSAGES, continue_final_message=True)
    assert open_end["tokens"] == tokenizer.encode_chat(MESSAGES)
    assert open_end["token_strs"] == [tokenizer.token(id) for id in open_end["tokens"]]
    assert tokenizer.decode(closed["tokens"], skip_special_tokens=False) == "<|begin|><|user|>Hi<|end|>"
    assert tokenizer.decode(continued["tokens"], skip_special_tokens=False) == "<|begin|><|user|>Hi"


def test_tools_are_shown_to_the_template(serve_script: Serve) -> None:
    tool = {"type": "function", "function": {"name": "add"}}
    template = "{% for tool in tools %}{{ tool.function.name }}{% endfor %}"
    with serve_script([]) as served, Tokenizer.load(BUILTIN, chat_template=template) as served.state.tokenizer:
        ids = post(served, "/tokenize", messages=MESSAGES, tools=[tool])["tokens"]
        assert served.state.tokenizer.decode(ids) == "add"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
        (
            "/tokenize",
            {"messages": MESSAGES, "continue_final_message": True, "add_generation_prompt": True},
            "add_generation_prompt",
        ),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "unknown": 1}, "unknown"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": ["5"]}, "tokens[0]"),
    ],
)
def test_what_cannot_be_done_is_refused_with_its_field(
    serve_script: Serve, path: str, body: dict[str, Any], param: str
) -> None:
    with serve_script([]) as served:
        assert post(served, path, 400, **body)["error"]["param"] == param
