"""Encoding, shards and packing: every token once, whole documents, and the right ones counted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.models.tokenizer import Tokenizer
from strata.train.data.encoding import Encoded
from strata.train.encode import Encoder
from strata.train.pack import Packer
from strata.train.shards import Shards
from strata.train.tasks.mixture import document
from strata.train.tasks.spelling import TASKS as SPELLING_TASKS
from strata.train.vocabulary import SPECIAL_TOKENS


class HeldShards(Shards):
    """Shards from memory."""

    def __init__(self, shards: list[Encoded]) -> None:
        self.documents = len(shards[0].offsets) - 1
        self._all = shards

    def read(self, index: int) -> Encoded:
        return self._all[index]


def encoded(lengths: list[int], first: int) -> Encoded:
    """Documents of these lengths whose tokens count up from `first`, every second token wanted but no first one."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = (first + np.arange(offsets[-1])).astype(np.uint16)
    wanted = np.arange(offsets[-1]) % 2 == 1
    wanted[offsets[:-1]] = False
    return Encoded(tokens, wanted, offsets)


@given(
    st.integers(1, 4).flatmap(
        lambda documents: st.lists(
            st.lists(st.integers(1, 20), min_size=documents, max_size=documents), min_size=2, max_size=6
        )
    ),
    st.integers(20, 70),
)
@settings(max_examples=150, deadline=None)
def test_packing_keeps_every_document_whole(lengths: list[list[int]], budget: int) -> None:
    shards, first = [], 0
    for one in lengths:
        shards.append(encoded(one, first))
        first += sum(one)
    # A last shard with a document that never fits beside others, so that the end is never read past.
    documents = len(lengths[0])
    packer = Packer(HeldShards([*shards, encoded([budget] * documents, first)]), budget, longest=budget)
    total = sum(len(one) for one in lengths)
    flat = [length for one in lengths for length in one]
    at, tokens, found, pairs = 0, [], [], []
    while at < total:
        batch = packer.batch(at)
        assert batch.next_document > at
        assert len(batch.tokens) <= budget
        assert batch.offsets[-1] == len(batch.tokens)
        # As many as fit: the next document would not.
        if batch.next_document < total:
            assert len(batch.tokens) + flat[batch.next_document] > budget
        for start, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
            assert batch.positions[start:end].tolist() == list(range(end - start))
            found.append(int(end - start))
        # A target follows its row, in the same document.
        document_of = np.repeat(np.arange(len(batch.lengths)), batch.lengths)
        assert (batch.tokens[batch.rows + 1] == batch.targets).all()
        assert (document_of[batch.rows] == document_of[batch.rows + 1]).all()
        pairs += batch.targets.tolist()
        tokens += batch.tokens.tolist()
        at = batch.next_document
    assert found[:total] == flat
    assert tokens[: sum(flat)] == list(range(sum(flat)))
    expected = [int(token) for shard in shards for token in shard.tokens[shard.wanted]]
    assert pairs[: len(expected)] == expected


def test_too_long_a_document_is_an_error_not_a_cut() -> None:
    shards = HeldShards([encoded([5, 30, 5], 0), encoded([5, 5, 5], 40)])
    with pytest.raises(ValueError, match=r"document 1 has 30 tokens.*tokens_per_batch = 20"):
        Packer(shards, 20, longest=64).batch(1)
    with pytest.raises(ValueError, match=r"document 1 has 30 tokens.*max_position_embeddings = 16"):
        Packer(shards, 40, longest=16).batch(0)


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
    import random

    example = reversal.sample(random.Random(0))
    parts = example.reply.rsplit("Answer: ", 1)[1].split("\u2060")
    assert all(len(part) == 1 for part in parts)
    assert "".join(parts) == example.answer


def test_shards_written_by_workers_equal_those_written_here(tokenizer_folder: Path, tmp_path: Path) -> None:
    path = tokenizer_folder / "tokenizer.json"
    with Shards(tmp_path / "workers", path, seed=4, documents=8) as ahead, Shards(tmp_path / "own", path, 4, 8) as own:
        ahead.start_workers(2, 0, 3)
        for index in range(4):  # the last one is nobody's, so it is written when asked for
            one, other = ahead.read(index), own.read(index)
            assert (one.tokens == other.tokens).all()
            assert (one.wanted == other.wanted).all()
            assert (one.offsets == other.offsets).all()
    whole = Encoder(tokenizers.Tokenizer.from_file(str(path))).encode([document(4, i) for i in range(8, 16)])
    assert (own.read(1).tokens == whole.tokens).all()


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
