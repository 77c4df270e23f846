"""Which tokens of a chat are learned: what generation would write, seen after what generation would see."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from strata.text.tokenizer import Tokenizer
from strata.train.data.encoding import Document, encode_chat
from strata.train.data.records import encode_record

TURNS = [
    {"role": "system", "content": "the box"},
    {"role": "user", "content": "quick?"},
    {"role": "assistant", "content": "brown fox"},
    {"role": "user", "content": "lazy?"},
    {"role": "assistant", "content": "dog"},
]


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Iterator[Tokenizer]:
    with Tokenizer.load(folder) as loaded:
        yield loaded


def wanted(tokenizer: Tokenizer, document: Document) -> str:
    return tokenizer.decode(document.tokens[document.loss_mask].tolist(), skip_special_tokens=False)


def test_assistant_turns_and_their_ends_are_wanted(tokenizer: Tokenizer) -> None:
    (document,) = encode_chat(tokenizer, TURNS)
    assert document.tokens.tolist() == tokenizer.encode_chat(TURNS, add_generation_prompt=False)
    assert wanted(tokenizer, document) == "brown fox<|end|>dog<|end|>"
    # Before every turn stands exactly the prompt that generation gets.
    for turn in (2, 4):
        prompt = tokenizer.encode_chat(TURNS[:turn])
        assert document.tokens[: len(prompt)].tolist() == prompt
        assert document.loss_mask[len(prompt)]
        assert not document.loss_mask[len(prompt) - 1]


def test_what_a_template_writes_after_the_end_does_not_count(folder: Path) -> None:
    template = (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    with Tokenizer.load(folder, template) as tokenizer:
        (document,) = encode_chat(tokenizer, TURNS)
        assert wanted(tokenizer, document) == "brown fox<|end|>dog<|end|>"


def test_a_template_that_rewrites_earlier_turns_gives_a_document_a_turn(folder: Path) -> None:
    """Reasoning is shown in the last turn only, as Qwen3's template does."""
    template = (
        "{% for m in messages %}<|{{ m.role }}|>"
        "{% if m.thinking and loop.last %}({{ m.thinking }}){% endif %}{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    turns = [turn | {"thinking": "hm"} if turn["role"] == "assistant" else turn for turn in TURNS]
    with Tokenizer.load(folder, template) as tokenizer:
        first, second = encode_chat(tokenizer, turns)
        assert wanted(tokenizer, first) == "(hm)brown fox<|end|>"
        assert wanted(tokenizer, second) == "(hm)dog<|end|>"
        assert second.tokens.tolist()[: len(tokenizer.encode_chat(turns[:4]))] == tokenizer.encode_chat(turns[:4])
        assert "hm" not in tokenizer.decode(second.tokens[~second.loss_mask].tolist())


def test_a_template_without_its_own_generation_prompt_is_refused(folder: Path) -> None:
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}now you speak: {% endif %}"
    )
    with (
        Tokenizer.load(folder, template) as tokenizer,
        pytest.raises(ValueError, match=r"does not write messages\[2\] after its own generation prompt"),
    ):
        encode_chat(tokenizer, TURNS)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (TURNS[:2], "no assistant turn"),
        (TURNS[2:3], "the first message is the assistant's"),
        (["hello"], r"messages\[0\] must be like"),
    ],
)
def test_chats_that_cannot_be_used(tokenizer: Tokenizer, messages: list[dict[str, str]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encode_chat(tokenizer, messages)


@pytest.mark.parametrize("empty", [None, [], "", " \n", [{"type": "text", "text": ""}]])
def test_a_turn_that_says_nothing_is_read_and_not_learned(tokenizer: Tokenizer, empty: object) -> None:
    turns = [*TURNS[:2], {"role": "assistant", "content": empty, "tool_calls": []}, *TURNS[3:]]
    (document,) = encode_chat(tokenizer, turns)
    assert wanted(tokenizer, document) == "dog<|end|>"
    assert document.tokens.tolist() == tokenizer.encode_chat(turns, add_generation_prompt=False)
    assert encode_chat(tokenizer, turns[:3]) == []


@pytest.mark.parametrize("said", [{"tool_calls": [{"name": "jump"}]}, {"reasoning": "hm"}, {"refusal": "no"}])
def test_a_turn_without_content_that_says_something_is_learned(folder: Path, said: dict[str, object]) -> None:
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.thinking }}{{ m.content }}"
        "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    with Tokenizer.load(folder, template) as tokenizer:
        (document,) = encode_chat(tokenizer, [TURNS[1], {"role": "assistant", "content": None, **said}])
        shown = {"tool_calls": '{"name": "jump", "arguments": {}}', "reasoning": "hm", "refusal": "no"}
        assert wanted(tokenizer, document) == shown[next(iter(said))] + "<|end|>"


@pytest.mark.parametrize("nothing", ["", None, []])
def test_a_reply_that_says_nothing_may_be_the_rejected_one(tokenizer: Tokenizer, nothing: object) -> None:
    record = {"prompt": TURNS[:2], "chosen": [TURNS[2]], "rejected": [{"role": "assistant", "content": nothing}]}
    chosen, rejected = encode_record(tokenizer, "preference", record)
    assert (wanted(tokenizer, chosen), wanted(tokenizer, rejected)) == ("brown fox<|end|>", "<|end|>")
