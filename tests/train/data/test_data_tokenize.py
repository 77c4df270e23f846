"""Files become shards: formats, several processes, stopped and damaged runs, bad input, long texts."""

from __future__ import annotations

import json
import random
import sys
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
from tests.train.samples import sample, write_lines

WORDS = ["one two", "three", "größer 東京 🙂", "a much longer text with many more words " * 5, "end"]


def texts(dataset: TokenDataset, tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.decode(sample(dataset, number)[0].tokens.tolist()) for number in range(dataset.samples)]


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


@pytest.mark.parametrize("bytes_per_shard", [1, 30, 100, 10**6])
def test_every_line_is_in_exactly_one_shard(
    folder: Path, loaded: Tokenizer, tmp_path: Path, bytes_per_shard: int
) -> None:
    file = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in WORDS])
    index = tokenize([file], folder, tmp_path / "out", bytes_per_shard=bytes_per_shard)
    dataset = TokenDataset(tmp_path / "out")
    assert texts(dataset, loaded) == WORDS
    expected = [encode_text(loaded, text) for text in WORDS]
    for number, document in enumerate(expected):
        (read,) = sample(dataset, number)
        assert np.array_equal(read.tokens, document.tokens)
        assert np.array_equal(read.loss_mask, document.loss_mask)
        assert read.tokens[-1] == loaded.eos_ids[0]
    lengths = [len(document.tokens) for document in expected]
    assert dataset.lengths(np.arange(dataset.samples)).tolist() == lengths
    assert (dataset.tokens, dataset.longest) == (sum(lengths), max(lengths))
    assert len(index.shards) == -(-file.stat().st_size // bytes_per_shard)


def test_parquet_and_text_give_what_jsonl_gives(folder: Path, loaded: Tokenizer, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": WORDS}), tmp_path / "a.parquet", row_group_size=2)
    tokenize([tmp_path / "a.parquet"], folder, tmp_path / "rows", bytes_per_shard=1)
    assert texts(TokenDataset(tmp_path / "rows"), loaded) == WORDS
    (tmp_path / "raw").mkdir()
    for number, text in enumerate(WORDS):
        (tmp_path / f"raw/{number}.txt").write_text(text, encoding="utf-8")
    tokenize([tmp_path / "raw"], folder, tmp_path / "files")
    assert texts(TokenDataset(tmp_path / "files"), loaded) == WORDS


def test_parquet_without_pyarrow_says_what_to_install(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"needs pyarrow: pip install 'strata-llm\[parquet\]'"):
        tokenize([tmp_path / "a.parquet"], folder, tmp_path / "out")


def test_processes_and_a_stopped_run_change_nothing(folder: Path, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in WORDS])
    alone = tokenize([file], folder, tmp_path / "alone", bytes_per_shard=100)
    seen: list[tuple[int, int]] = []
    together = tokenize(
        [file], folder, tmp_path / "two", bytes_per_shard=100, workers=2, report=lambda *at: seen.append(at)
    )
    assert together == alone
    assert seen == [(done, len(alone.shards)) for done in range(len(alone.shards) + 1)]
    # Stopped: no index and one shard without its entry, which alone is written again.
    out = tmp_path / "alone"
    (out / "index.json").unlink()
    (out / "shard-00001.json").unlink()
    times = {path.name: path.stat().st_mtime_ns for path in out.glob("*.npy")}
    assert tokenize([file], folder, out, bytes_per_shard=100) == alone
    changed = {path.name for path in out.glob("*.npy") if path.stat().st_mtime_ns != times[path.name]}
    assert changed == {"shard-00001.tokens.npy", "shard-00001.offsets.npy"}
    with pytest.raises(ValueError, match="made with other longest; choose another folder"):
        tokenize([file], folder, out, bytes_per_shard=100, longest=8)


def test_a_damaged_shard_is_named_and_skipped_only_if_asked(folder: Path, loaded: Tokenizer, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in WORDS])
    tokenize([file], folder, tmp_path / "out", bytes_per_shard=30)
    whole = TokenDataset(tmp_path / "out")
    path = tmp_path / "out/shard-00000.tokens.npy"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"shard-00000\.tokens\.npy does not have the checksum"):
        TokenDataset(tmp_path / "out")
    assert TokenDataset(tmp_path / "out", checksums=False).fingerprint == whole.fingerprint
    rest = TokenDataset(tmp_path / "out", skip_corrupt=True)
    assert rest.skipped == ["shard-00000"]
    assert texts(rest, loaded) == WORDS[-rest.samples :]
    assert rest.samples < len(WORDS)
    assert rest.fingerprint != whole.fingerprint
    path.unlink()
    for checksums in (True, False):
        with pytest.raises(ValueError, match=r"shard-00000\.tokens\.npy is missing"):
            TokenDataset(tmp_path / "out", checksums=checksums)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files as Linux shows them")
def test_shards_are_mapped_without_keeping_files_open(folder: Path, tmp_path: Path) -> None:
    """A process may have 1024 files open, and the shards of a large dataset are more."""
    file = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in WORDS])
    tokenize([file], folder, tmp_path / "out", bytes_per_shard=1)
    before = len(list(Path("/proc/self/fd").iterdir()))
    dataset = TokenDataset(tmp_path / "out")
    assert dataset.samples == 5
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_long_text_is_split_and_long_chats_are_left_out(folder: Path, loaded: Tokenizer, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in WORDS])
    tokenize([file], folder, tmp_path / "text", longest=16)
    dataset = TokenDataset(tmp_path / "text")
    parts = [sample(dataset, number)[0] for number in range(dataset.samples)]
    assert max(len(part.tokens) for part in parts) == 16 == dataset.longest
    whole = [id for text in WORDS for id in encode_text(loaded, text).tokens]
    assert [id for part in parts for id in part.tokens] == whole
    assert all(part.loss_mask[1:].all() and not part.loss_mask[0] for part in parts)
    chats = [
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": text}]}
        for text in ("yes", "no " * 40)
    ]
    index = tokenize([write_lines(tmp_path / "c.jsonl", chats)], folder, tmp_path / "chat", longest=16)
    assert (index.kind, index.shards[0].documents, index.shards[0].left_out) == ("chat", 1, 1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "every file is empty"),
        ("\n\n", "no records"),
        ('{"text": "a"}\n{"text": 3}\n', r"line 2: 'text' must be a text, got 3"),
        ('{"text": "a"}\n[1]\n', "line 2: the line must be a JSON object"),
        ('{"text": "a"}\n{"text\n', r"a\.jsonl, line 2, column 2: not JSON: .*; correct or remove the line"),
        ('{"body": "a"}\n', r"line 1: the record has the fields body; accepted are: instruction, output; messages; "),
        ('{"messages": [{"role": "user", "content": "a"}]}\n', "no assistant turn"),
    ],
)
def test_bad_input_names_its_place(folder: Path, tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(ValueError, match=message):
        tokenize([tmp_path / "a.jsonl"], folder, tmp_path / "out")
    with pytest.raises(ValueError, match="holds no tokenized data"):
        TokenDataset(tmp_path / "out")


def test_a_line_has_its_number_in_whatever_shard_it_is(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n\n' * 50 + '{"text": 3}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl, line 101: .*; correct or remove the record"):
        tokenize([tmp_path / "a.jsonl"], folder, tmp_path / "out", bytes_per_shard=100)


@pytest.mark.parametrize(
    ("line", "place"),
    [
        (b'{"text": "\xc3\xbc", }', r"column 1[35]: not JSON: .*"),
        (b'{"text": "\xc3\xbc\xff"}', r"column 12: not UTF-8: byte 0xff"),
        (b'{"text": "a"', r"column 13: not JSON: .*"),
        (b"[" * 200_000, r"not JSON: nested too deeply"),
    ],
)
def test_what_is_no_json_is_named_by_line_and_column(folder: Path, tmp_path: Path, line: bytes, place: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\r\n\r\n' * 20 + line + b"\r\n")
    separator = ", " if place.startswith("column") else ": "
    with pytest.raises(
        ValueError, match=rf"^{tmp_path}/a\.jsonl, line 41{separator}{place}; correct or remove the line"
    ):
        tokenize([tmp_path / "a.jsonl"], folder, tmp_path / "out", bytes_per_shard=100)


def test_corrected_data_replaces_a_plan_without_shards(folder: Path, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", [{"text": 3}])
    with pytest.raises(ValueError, match="'text' must be a text"):
        tokenize([file], folder, tmp_path / "out")
    write_lines(file, [{"text": "three"}])
    assert tokenize([file], folder, tmp_path / "out").shards[0].documents == 1
    write_lines(file, [{"text": "four and more"}])
    with pytest.raises(ValueError, match="made with other files and pieces; choose another folder, or remove it"):
        tokenize([file], folder, tmp_path / "out")


def test_unknown_and_missing_files(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a")
    with pytest.raises(ValueError, match=r"the ending '\.csv' is unknown"):
        tokenize([tmp_path / "a.csv"], folder, tmp_path / "out")
    with pytest.raises(ValueError, match="does not exist"):
        tokenize([tmp_path / "b.txt"], folder, tmp_path / "out")


def test_a_worker_without_room_says_so_and_the_same_command_goes_on(folder: Path, tmp_path: Path) -> None:
    """The limit on the size of files stands for a full disk; it holds for the processes that this one starts."""
    resource = pytest.importorskip("resource")
    file = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in WORDS] * 100)
    options = {"bytes_per_shard": file.stat().st_size // 2 + 1, "workers": 2}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(ValueError, match=r"cannot write .*shard-0000\d\.tokens\.npy: File too large; mend that"):
            tokenize([file], folder, tmp_path / "out", **options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert tokenize([file], folder, tmp_path / "out", **options) == tokenize([file], folder, tmp_path / "b", **options)


def test_an_index_that_was_not_written_so_is_refused(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    tokenize([write_lines(tmp_path / "a.jsonl", [{"text": text} for text in WORDS])], folder, out)
    written = json.loads((out / "index.json").read_text())
    (shard,) = written["shards"]
    for change, message in (
        ({"version": 2}, "version 2 is not 1"),
        ({"colour": "red"}, "unknown field `colour`"),
        ({"shards": [shard | {"tokens": "many"}]}, r"Expected `int`, got `str` - at `\$\.shards\[0\]\.tokens`"),
        ({"vocab_size": None}, r"Expected `int`, got `null` - at `\$\.vocab_size`"),
    ):
        (out / "index.json").write_text(json.dumps(written | change))
        with pytest.raises(ValueError, match=rf"index\.json cannot be read: .*{message}.*; tokenize again"):
            TokenDataset(out)


LETTERS = ["one", "Two", "größer", "東京", "слово", "word"]
LONG_WORDS = [
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
    return "".join(rng.choice(LONG_WORDS) + rng.choice(BLANKS) for _ in range(words))


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
    monkeypatch.setattr(long_text, "BYTES_PER_CHUNK", bytes_per_part)
    monkeypatch.setattr("strata.train.data.tokenize.BYTES_PER_CHUNK", bytes_per_part)
    seen: list[tuple[int, int]] = []
    out = tmp_path / "parts"
    made = tokenize(
        [tmp_path / "in"], folder, out, longest=longest, bytes_per_shard=bytes_per_shard,
        report=lambda *at: seen.append(at),
    )  # fmt: skip
    whole, parts = TokenDataset(tmp_path / "whole"), TokenDataset(out)
    assert (parts.samples, parts.tokens, parts.longest) == (whole.samples, whole.tokens, whole.longest)
    for number in range(whole.samples):
        (one,), (other,) = sample(whole, number), sample(parts, number)
        assert np.array_equal(one.tokens, other.tokens)
        assert np.array_equal(one.loss_mask, other.loss_mask)
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] > len(made.shards)
    assert not (out / "parts").exists()


def test_a_stopped_run_goes_on_with_parts_and_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, out = BUILTIN_FOLDER, tmp_path / "out"
    monkeypatch.setattr("strata.train.data.tokenize.BYTES_PER_CHUNK", 1000)
    monkeypatch.setattr(long_text, "BYTES_PER_CHUNK", 1000)
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
