"""Long texts: encoded in parts, with the tokens and documents of the text encoded whole."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from strata.models.folder import BUILTIN_FOLDER
from strata.text.special_tokens import SpecialTokens
from strata.text.tokenizer import Tokenizer
from strata.train.data import encoding, long_text
from strata.train.data.encoding import encode_text, last_cut, text_ids
from strata.train.data.shards import TokenDataset
from strata.train.data.sources import file_ranges, read_text
from strata.train.data.tokenize import tokenize

LETTERS = ["one", "Two", "größer", "東京", "слово", "word"]
WORDS = [
    *LETTERS * 2,
    "don't",
    "3.14159",
    "1234567",
    "(x)",
    "...",
    "!?",
    "🙂",
    "/path",
]
BLANKS = [*" " * 8, "  ", "    ", "\n", "\n", "\n\n", " \n", "\n ", "\r\n", "\t", "\n\t\t", "\u00a0", "\u3000", "\r"]
# As tokenizer.json of Llama 3, of GPT-4o and of DeepSeek-V3 have them.
PATTERNS = {
    "llama 3": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    ],
    "gpt-4o": [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "deepseek": [
        r"\p{N}{1,3}",
        r"[一-龥぀-ゟ゠-ヿ]+",
        r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+",
    ],
}


def a_text(words: int, seed: int = 0) -> str:
    rng = random.Random(seed)
    return "".join(rng.choice(WORDS) + rng.choice(BLANKS) for _ in range(words))


def trained(pre_tokenizer: pre_tokenizers.PreTokenizer) -> Tokenizer:
    """Byte-level BPE that has learned the text, blanks and all."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizer, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        [a_text(3000, 1)], trainers.BpeTrainer(vocab_size=600, show_progress=False, initial_alphabet=alphabet)
    )
    return Tokenizer(backend, SpecialTokens({}, (), ()), {})


@pytest.fixture(scope="module")
def by_name() -> dict[str, Tokenizer]:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made = {"built in": Tokenizer.load(BUILTIN_FOLDER)}
    made["gpt-2"] = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
    for name, patterns in PATTERNS.items():
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
        made[name] = trained(pre_tokenizers.Sequence([*splits, byte_level]))
    return made


@pytest.mark.parametrize("name", ["built in", "gpt-2", *PATTERNS])
def test_pieces_have_the_ids_of_the_whole(
    name: str, by_name: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, text = by_name[name], a_text(6000)
    whole = tokenizer.encode(text)
    monkeypatch.setattr(encoding, "_AT_ONCE", 300)
    cuts = sum(1 for _ in encoding._chunks(text))
    assert cuts > 50
    ends = [tokenizer.eos_ids[0]] if tokenizer.eos_ids else []
    assert text_ids(tokenizer, text).tolist() == whole + ends
    assert encode_text(tokenizer, text).tokens.tolist() == whole + ends


def test_only_the_ends_of_a_text_have_what_a_tokenizer_adds(by_name: dict[str, Tokenizer]) -> None:
    tokenizer = by_name["built in"]
    assert text_ids(tokenizer, "some", is_first=False, is_last=False).tolist() == tokenizer.encode("some", False)
    parts = [text_ids(tokenizer, "some", is_last=False), text_ids(tokenizer, " text", is_first=False)]
    assert np.concatenate(parts).tolist() == encode_text(tokenizer, "some text").tokens.tolist()


@pytest.mark.parametrize(
    ("text", "cut"),
    [
        ("one two three", "one two"),
        ("one, two; 3 four", "one, two; 3 four"),
        ("one.\ntwo.  three", "one.\n"),
        ("one.\r\ntwo.", "one.\r\n"),
        ("one\n\ntwo", "one\n\ntwo"),
        ("one \ntwo", "one \ntwo"),
        ("nothing", "nothing"),
    ],
)
def test_where_a_text_is_cut(text: str, cut: str) -> None:
    assert text[: last_cut(text)] == cut


@pytest.mark.parametrize("text", [a_text(500), "東京🙂é\r\n" * 300, "\r\n" * 300, "é" * 1000, " \n" * 500])
@pytest.mark.parametrize("each", [1, 9, 64, 1000])
def test_pieces_of_a_file_are_its_text_in_whole_characters(text: str, each: int, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(text.encode())
    ranges = file_ranges([tmp_path / "a.txt"], each)
    assert max(file_range.end - file_range.start for file_range in ranges) <= max(each, 8)
    assert "".join(read_text(file_range) for file_range in ranges) == (tmp_path / "a.txt").read_text(encoding="utf-8")


def test_what_is_no_utf_8_is_named_by_its_byte(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"word " * 100 + b"\xff" * 100)
    with pytest.raises(ValueError, match=r"a\.txt is not UTF-8: .* at byte 500; convert it first"):
        tokenize([tmp_path / "a.txt"], folder, tmp_path / "out", bytes_per_shard=64)


@pytest.mark.parametrize("longest", [2, 100, None])
@pytest.mark.parametrize(("bytes_per_shard", "bytes_per_part"), [(10**6, 900), (3000, 1000), (900, 10**6)])
def test_documents_do_not_depend_on_parts_and_shards(
    bytes_per_shard: int, bytes_per_part: int, longest: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of `longest` tokens but the last, wherever shards end; and beside other files."""
    folder, text = BUILTIN_FOLDER, a_text(700)
    (tmp_path / "in").mkdir()
    for name, content in (("a", "A short one."), ("b", text), ("c", "Another short one.")):
        (tmp_path / f"in/{name}.txt").write_bytes(content.encode())
    tokenize([tmp_path / "in"], folder, tmp_path / "whole", longest=longest)
    monkeypatch.setattr(long_text, "BYTES_PER_PART", bytes_per_part)
    monkeypatch.setattr("strata.train.data.tokenize.BYTES_PER_PART", bytes_per_part)
    seen: list[tuple[int, int]] = []
    out = tmp_path / "parts"
    made = tokenize(
        [tmp_path / "in"], folder, out, longest=longest, bytes_per_shard=bytes_per_shard,
        report=lambda *at: seen.append(at),
    )  # fmt: skip
    whole, parts = TokenDataset(tmp_path / "whole"), TokenDataset(out)
    assert (parts.samples, parts.tokens, parts.longest) == (whole.samples, whole.tokens, whole.longest)
    for number in range(whole.samples):
        (one,), (other,) = whole.sample(number), parts.sample(number)
        assert np.array_equal(one.tokens, other.tokens)
        assert np.array_equal(one.loss_mask, other.loss_mask)
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] > len(made.shards)
    assert not (out / "parts").exists()


def test_a_stopped_run_goes_on_with_parts_and_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, out = BUILTIN_FOLDER, tmp_path / "out"
    monkeypatch.setattr("strata.train.data.tokenize.BYTES_PER_PART", 1000)
    monkeypatch.setattr(long_text, "BYTES_PER_PART", 1000)
    (tmp_path / "a.txt").write_bytes(a_text(1200).encode())

    class Stopped(Exception):
        pass

    def until(stop: int) -> None:
        def report(done: int, of: int) -> None:
            if done == stop:
                raise Stopped

        tokenize([tmp_path / "a.txt"], folder, out, longest=50, bytes_per_shard=4000, report=report)

    with pytest.raises(Stopped):
        until(3)
    parts = {path.name: path.stat().st_mtime_ns for path in (out / "parts").glob("*.npy")}
    assert parts
    with pytest.raises(Stopped):
        until(12)
    assert {path.name: path.stat().st_mtime_ns for path in (out / "parts").glob("*.npy") if path.name in parts} == parts
    with pytest.raises(ValueError, match="made with other longest"):
        tokenize([tmp_path / "a.txt"], folder, out, longest=60, bytes_per_shard=4000)
    until(-1)
    made = tokenize([tmp_path / "a.txt"], folder, tmp_path / "new", longest=50, bytes_per_shard=4000, workers=2)
    assert (out / "index.json").read_text() == (tmp_path / "new/index.json").read_text()
    (out / "index.json").unlink()
    (out / f"{made.shards[1].name}.json").unlink()
    assert tokenize([tmp_path / "a.txt"], folder, out, longest=50, bytes_per_shard=4000) == made
