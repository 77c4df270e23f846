"""Exercises as tokens: what the chat template writes, the replies counted, digits and letters apart."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import tokenizers

from strata.serve.replies.reply_parser import ReplyParser, collect
from strata.text.tokenizer import Tokenizer
from strata.train.data.encode import Encoder
from strata.train.tasks.example import BOUNDARY
from strata.train.tasks.mixture import document
from strata.train.tasks.spelling import TASKS as SPELLING_TASKS
from strata.train.tasks.vocabulary import SPECIAL_TOKENS


def test_encoding_is_what_the_chat_template_writes(tokenizer: tokenizers.Tokenizer, tokenizer_folder: Path) -> None:
    encoder = Encoder(tokenizer)
    documents = [document(0, i) for i in range(60)]
    made = encoder.encode(documents)
    with Tokenizer.load(tokenizer_folder) as served:
        for one, start, end in zip(documents, made.offsets[:-1], made.offsets[1:], strict=True):
            ids = made.tokens[start:end].tolist()
            text = served.decode(ids, skip_special_tokens=False)
            system = [] if one.system is None else [{"role": "system", "content": one.system}]
            tools = [tool.schema for tool in one.tools] or None
            messages = [*system, *(message for example in one.examples for message in example.messages)]
            if one.plain:
                question, answer = messages
                assert text == f"<|begin|>{question['content']}\n{answer['content']}<|end|>"
            else:
                assert text == served.chat_text(messages, add_generation_prompt=False, tools=tools).text
                first = one.examples[0]
                asked = messages[len(system) : len(system) + 1]
                prompts = [(asked, encoder.prompt(first))]
                if first.call is not None:
                    prompts.append((first.messages[:-1], encoder.prompt_after_call(first)))
                for chat, prompt in prompts:
                    assert served.encode_chat(chat, tools=tools) == prompt
                    if not system:
                        assert ids[: len(prompt)] == prompt
    assert sum(bool(one.tools) for one in documents) > 5
    assert sum(example.call is not None for one in documents for example in one.examples) > 5


def test_wanted_is_replies_and_their_ends(tokenizer: tokenizers.Tokenizer) -> None:
    documents = [document(0, i) for i in range(60)]
    made = Encoder(tokenizer).encode(documents)
    for one, start, end in zip(documents, made.offsets[:-1], made.offsets[1:], strict=True):
        ids, wanted = made.tokens[start:end], made.loss_mask[start:end]
        text = tokenizer.decode(ids[wanted].tolist(), skip_special_tokens=False)
        said = [text.replace(BOUNDARY, "") for example in one.examples for text in example.written]
        replies = "".join(text + "<|end|>" for text in said)
        assert text == ("\n" + replies if one.plain else replies)


def test_digits_and_reversed_letters_are_single_tokens(tokenizer: tokenizers.Tokenizer) -> None:
    vocabulary = tokenizer.get_vocab()
    assert [vocabulary[token] for token in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
    assert not [token for token in vocabulary if sum(character.isdigit() for character in token) and len(token) > 1]
    reversal = next(task for task in SPELLING_TASKS if task.name == "word reversal")
    example = reversal.sample(random.Random(0))
    parts = example.reply.rsplit("Answer: ", 1)[1].split("\u2060")
    assert all(len(part) == 1 for part in parts)
    assert "".join(parts) == example.answer


def test_tokenizer_folder_loads_in_transformers(tokenizer_folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(tokenizer_folder)
    messages = [{"role": "user", "content": "What is 47 + 38?"}]
    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    with Tokenizer.load(tokenizer_folder) as ours:
        assert text == ours.chat_text(messages).text
        assert theirs("Sort 3, 12")["input_ids"] == ours.encode("Sort 3, 12")
        assert theirs.eos_token_id == ours.eos_ids[0]
        with pytest.raises(ValueError, match="roles are"):
            ours.chat_text([{"role": "function", "content": "x"}])


FUNCTIONS = [
    {"name": "now"},
    {"name": "f", "description": "Does it.", "parameters": {"type": "object", "properties": {}}},
    {
        "name": "g",
        "parameters": {
            "properties": {
                "a": {"type": "integer"},
                "b": {"enum": ["x", 2]},
                "c": {"type": ["string", "null"]},
                "d": {"anyOf": [{"type": "array"}]},
                "items": True,
                "e": {"type": 5},
            },
            "required": ["a", "items"],
        },
    },
]


def test_the_template_shows_every_kind_of_tool_in_a_line(tokenizer_folder: Path) -> None:
    tools = [{"type": "function", "function": function} for function in FUNCTIONS]
    with Tokenizer.load(tokenizer_folder) as served:
        text = served.chat_text([{"role": "user", "content": "Go."}], tools=tools).text
    lines = "Tools:\nnow()\nf(): Does it.\ng(a: integer, b?: x|2, c?: string|null, d?: any, items: any, e?: any)"
    assert text == f"<|begin|><|system|>{lines}<|end|><|user|>Go.<|end|><|assistant|>"


def test_the_template_shows_calls_as_the_parser_reads_them(tokenizer_folder: Path) -> None:
    """Whatever a client sends back: arguments as an object or as the text that they were, beside content or without."""
    functions = [{"name": "f", "arguments": {"a": "ü", "b": 1}}, {"name": "g", "arguments": "{}"}]
    calls = [{"id": str(i), "type": "function", "function": one} for i, one in enumerate(functions)]
    with Tokenizer.load(tokenizer_folder) as served:
        for content in ("", "So.", None):
            said = {"role": "assistant", "content": content, "tool_calls": calls}
            text = served.chat_text([{"role": "user", "content": "Go."}, said, {"role": "tool", "content": "7"}]).text
            _, _, rest = text.partition("<|assistant|>")
            written, _, rest = rest.partition("<|end|>")
            assert rest == "<|tool|>7<|end|><|assistant|>"
            parser = ReplyParser("hermes", reasoning=False)
            reply = collect(parser.append(written) + parser.finish())
            assert reply.content == (content or "")
            assert [(call.name, call.arguments) for call in reply.tool_calls] == [
                ("f", '{"a": "ü", "b": 1}'),
                ("g", "{}"),
            ]
