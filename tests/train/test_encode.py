"""Exercises as tokens: what the chat template writes, the replies counted, digits and letters apart."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import tokenizers

from strata.models.tokenizer import Tokenizer
from strata.train.encode import Encoder
from strata.train.tasks.mixture import document
from strata.train.tasks.spelling import TASKS as SPELLING_TASKS
from strata.train.vocabulary import SPECIAL_TOKENS


def test_encoding_is_what_the_chat_template_writes(tokenizer: tokenizers.Tokenizer, tokenizer_folder: Path) -> None:
    encoder = Encoder(tokenizer)
    documents = [document(0, i) for i in range(60)]
    made = encoder.encode(documents)
    with Tokenizer.load(tokenizer_folder) as served:
        for one, start, end in zip(documents, made.offsets[:-1], made.offsets[1:], strict=True):
            ids = made.tokens[start:end].tolist()
            text = served.decode(ids, skip_special_tokens=False)
            system = [] if one.system is None else [{"role": "system", "content": one.system}]
            messages = [*system, *(message for example in one.examples for message in example.messages)]
            if one.plain:
                question, answer = messages
                assert text == f"<|begin|>{question['content']}\n{answer['content']}<|end|>"
            else:
                assert text == served.chat(messages, add_generation_prompt=False)
                question_ids = encoder.prompt(one.examples[0])
                assert served.encode_chat(messages[len(system) : len(system) + 1]) == question_ids
                if not system:
                    assert ids[: len(question_ids)] == question_ids


def test_wanted_is_replies_and_their_ends(tokenizer: tokenizers.Tokenizer) -> None:
    documents = [document(0, i) for i in range(60)]
    made = Encoder(tokenizer).encode(documents)
    for one, start, end in zip(documents, made.offsets[:-1], made.offsets[1:], strict=True):
        ids, wanted = made.tokens[start:end], made.wanted[start:end]
        text = tokenizer.decode(ids[wanted].tolist(), skip_special_tokens=False)
        replies = "".join(example.messages[1]["content"] + "<|end|>" for example in one.examples)
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
        assert text == ours.chat(messages)
        assert theirs("Sort 3, 12")["input_ids"] == ours.encode("Sort 3, 12")
        assert theirs.eos_token_id == ours.eos_ids[0]
        with pytest.raises(ValueError, match="roles are"):
            ours.chat([{"role": "tool", "content": "x"}])
