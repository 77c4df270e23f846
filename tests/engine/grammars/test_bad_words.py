"""Bad words as ids: what is forbidden spells the word, and what spells the word is forbidden."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

import strata
from strata import LLM, SamplingParams
from strata.engine.bad_words import bad_word_ids
from strata.text.special_tokens import SpecialTokens
from strata.text.tokenizer import Tokenizer

BUILTIN = Path(strata.__file__).parent / "models" / "builtin"
TEXTS = [
    "A red fox ran, and the reader read it.\n\tInside:  rings, ringing ing.\n\n",
    "In the end 1234 reds don't spread! \n  12 of them said 'no': (naïve) café.\n",
    "red red\nred reading-room; x = 10 # of 100\n\n\n\tend",
] * 4


def byte_level(space_before: bool = False) -> Backend:
    """As GPT-2's, or with digits in threes as in later ones."""
    backend = Backend(models.BPE())
    backend.normalizer = normalizers.NFC()
    cut = r"\d{1,3}|'(?:s|t)| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"
    backend.pre_tokenizer = (
        pre_tokenizers.ByteLevel(add_prefix_space=True)
        if space_before
        else pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(cut), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
        )
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    )
    return backend


def sentencepiece() -> Backend:
    """As Llama 2's: a space is written ▁ and put before each text; bytes stand for what the vocabulary lacks."""
    trained = Backend(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split(Regex("▁*[^▁]+|▁+"), "isolated")
    words = [f" {text}".replace("\n", "").replace("\t", "").replace("é", "") for text in TEXTS]
    trained.train_from_iterator([*words, "     "], trainers.BpeTrainer(vocab_size=180, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    merges = [tuple(pair) for pair in model["merges"]]
    vocabulary = {piece: id for id, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": lambda: Tokenizer(byte_level(), SpecialTokens({}, (), ()), {}),
    "byte-level with a space before": lambda: Tokenizer(byte_level(True), SpecialTokens({}, (), ()), {}),
    "sentencepiece": lambda: Tokenizer(sentencepiece(), SpecialTokens({}, (), ()), {}),
    "built-in": lambda: Tokenizer.load(BUILTIN),
}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Iterator[Tokenizer]:
    with KINDS[request.param]() as tokenizer:
        yield tokenizer


def forbidden_in(ids: list[int], forbidden: list[tuple[int, ...]]) -> set[int]:
    """Where in an output an id completes what is forbidden."""
    return {
        end for end in range(len(ids) + 1) for word in forbidden if tuple(ids[max(0, end - len(word)) : end]) == word
    }


# Begins a text, as a prompt does, and is in no word.
PROMPT = "#"
WORDS = ["red", "read", "ing", "A", "fox", "12", "345", "no", "é", "'s", "x", "end", "-", ".", ":", "in the"]
BLANKS = [" ", "  ", "\n", "\n\n", "\t", " \n", "\n  "]


def random_text(chance: random.Random, pieces: int) -> str:
    return "".join(chance.choice(WORDS if chance.random() < 0.5 else BLANKS) for _ in range(pieces))


def test_what_is_forbidden_is_in_the_text_and_where_tokens_spell_the_word_it_is_forbidden(tokenizer: Tokenizer) -> None:
    chance = random.Random(0)
    spelled = 0
    for _ in range(400):
        word = random_text(chance, chance.choice([1, 1, 1, 2, 3]))
        forbidden = bad_word_ids([word], tokenizer)
        for _ in range(10):
            parts = [random_text(chance, chance.randint(0, 4)), word, random_text(chance, chance.randint(0, 4))]
            text = PROMPT + "".join(part for part in parts if part is not word or chance.random() < 0.7)
            ids = tokenizer.encode(text, add_special_tokens=False)
            # The text up to each token, of which some end within a character.
            places = [tokenizer.decode(ids[:count]) for count in range(len(ids) + 1)]
            assert places[-1].lstrip(" ") == text
            completed = forbidden_in(ids, forbidden)
            for end in completed:
                assert places[end].endswith(word), (word, text, ids[:end])
            for start, begun in enumerate(places):
                for end in range(start + 1, len(ids) + 1):
                    # Tokens that the tokenizer writes for the word alone too, wherever it stands.
                    if places[end] in (begun + word, f"{begun} {word}") and as_always(tokenizer, ids[start:end], word):
                        spelled += 1
                        assert end in completed, (word, text, ids[start:end])
    assert spelled > 500


def as_always(tokenizer: Tokenizer, ids: list[int], word: str) -> bool:
    """Whether these ids are how the tokenizer writes the word, or a space and the word, behind a letter or a line."""
    written = [
        tokenizer.encode(f"{before}{space}{word}", add_special_tokens=False) for before in "b\n" for space in ("", " ")
    ]
    return any(one[-len(ids) :] == ids for one in written)


@pytest.mark.parametrize("word", ["\n", "\t", "\n\n", " \n"])
def test_blanks_forbid_themselves_and_no_space(tokenizer: Tokenizer, word: str) -> None:
    forbidden = bad_word_ids([word], tokenizer)
    assert forbidden
    for ids in forbidden:
        assert tokenizer.decode([*tokenizer.encode("#"), *ids]).endswith(word)
    for text in ("# a b", "#  a", "#   b  ", "#ab cd"):
        assert not forbidden_in(tokenizer.encode(text, add_special_tokens=False), forbidden), text


def test_a_space_is_a_word_too(tokenizer: Tokenizer) -> None:
    forbidden = bad_word_ids([" "], tokenizer)
    ids = tokenizer.encode("#a ", add_special_tokens=False)
    assert len(ids) in forbidden_in(ids, forbidden)
    assert not forbidden_in(tokenizer.encode("#a\nb", add_special_tokens=False), forbidden)


def test_what_a_tokenizer_cannot_write_forbids_nothing() -> None:
    """It stands for what is not in its vocabulary with one token for all of that, and for a line with a space."""
    backend = Backend(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = Tokenizer(backend, SpecialTokens({}, (), ()), {})
    assert bad_word_ids(["c", "\n", "a"], tokenizer) == [(1,)]


def test_characters_that_a_tokenizer_composes_are_the_same_word() -> None:
    tokenizer = Tokenizer(byte_level(), SpecialTokens({}, (), ()), {})
    assert bad_word_ids(["cafe\u0301"], tokenizer) == bad_word_ids(["café"], tokenizer) != []


def test_an_output_without_lines_still_has_spaces() -> None:
    llm = LLM(device="cpu", dtype="float32", num_pages=200)
    prompts = ["Once upon a time", "A list:\n- one\n"]
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=60, ignore_eos=True, bad_words=["\n", "\t"])
    outputs = [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)]
    assert not any("\n" in text or "\t" in text for text in outputs)
    assert all(" " in text for text in outputs)
