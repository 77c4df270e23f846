"""Tokenizer folders: ids and text as transformers gives them, chat templates found where they may lie, clear errors."""

import json
import threading
import time
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import strata
from strata.text.tokenizer import Tokenizer, max_characters_per_token
from tests.text import backends

BUILTIN = Path(strata.__file__).parent / "models" / "builtin"

CORPUS = ["The cat sat on the mat.", "Größe naïve 東京 😀 e\u0301", "def f(x):\n    return x + 1\n"]
TEXTS = [
    "",
    "The cat",
    "  two  spaces ",
    "Größe 😀 日本 🦖\n",
    "<s>a</s>b<tool>c",
    "x<|im_end|>\n<|été|> <pad>y",
    "a </s> b <pad> c",
]
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho <s>"}, {"role": "user", "content": "?"}]
TEMPLATE = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"


def byte_level() -> tokenizers.Tokenizer:
    return backends.byte_level(CORPUS, 330, ["<s>", "</s>", "<|im_end|>"])


def byte_fallback() -> tokenizers.Tokenizer:
    return backends.byte_fallback(CORPUS[:1], 330)


def write(folder, backend, config=None, **files):
    """A tokenizer folder; names in `files` stand for `name.json`."""
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **(config or {})}
    for name, values in {"tokenizer_config": config, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(values))
    return folder


def adds_bos(backend):
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    return backend


def limits(backend):
    backend.enable_truncation(2)
    backend.enable_padding(length=30, pad_id=0, pad_token="<s>")
    return backend


def unlisted(backend):
    """Special tokens stand in the vocabulary, but tokenizer.json does not say that they are special."""
    state = json.loads(backend.to_str())
    state["added_tokens"] = []
    return tokenizers.Tokenizer.from_str(json.dumps(state))


NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
FOLDERS = {
    "named": lambda p: write(p, byte_level(), NAMED),
    "post-processor adds": lambda p: write(p, adds_bos(byte_level()), NAMED),
    "flags are ignored": lambda p: write(p, byte_level(), {**NAMED, "add_bos_token": True, "add_eos_token": True}),
    "byte fallback": lambda p: write(p, adds_bos(byte_fallback()), {**NAMED, "unk_token": "<unk>"}),
    "limits are ignored": lambda p: write(p, limits(byte_level()), NAMED),
    "unlisted": lambda p: write(p, unlisted(byte_level()), NAMED),
    "new tokens": lambda p: write(
        p, byte_level(), {**NAMED, "pad_token": "<pad>", "extra_special_tokens": ["<|été|>"]}
    ),
    "old name": lambda p: write(p, byte_level(), {**NAMED, "additional_special_tokens": ["<|été|>", "<tool>"]}),
    "objects": lambda p: write(
        p, byte_level(), {"eos_token": {"__type": "AddedToken", "content": "</s>", "lstrip": True}}
    ),
    "listed": lambda p: write(
        p,
        byte_level(),
        {
            **NAMED,
            "added_tokens_decoder": {
                "1": {"content": "</s>", "lstrip": True, "normalized": False, "special": True},
                "330": {"content": "<tool>", "normalized": False, "special": False},
                "331": {"content": "<pad>", "rstrip": True, "normalized": False, "special": True},
            },
        },
        special_tokens_map={"eos_token": "<|im_end|>"},
    ),
    "map": lambda p: write(
        p,
        byte_level(),
        {"bos_token": "<s>", "eos_token": "<s>"},
        special_tokens_map={"eos_token": {"content": "</s>"}, "additional_special_tokens": ["<tool>"]},
    ),
    "no config": lambda p: write(p, byte_level(), None, special_tokens_map=NAMED),
}


@pytest.fixture(scope="module", params=FOLDERS.values(), ids=FOLDERS.keys())
def pair(request, tmp_path_factory):
    folder = request.param(tmp_path_factory.mktemp("tokenizer"))
    with Tokenizer.load(folder) as ours:
        yield ours, AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_transformers(pair, text):
    ours, theirs = pair
    for add in (True, False):
        assert ours.encode(text, add_special_tokens=add) == theirs(text, add_special_tokens=add).input_ids


def test_special_tokens_are_those_of_transformers(pair):
    ours, theirs = pair
    assert ours.bos_id == theirs.bos_token_id
    assert ours.eos_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))
    assert set(theirs.all_special_ids) <= ours.special_ids
    assert ours.vocab_size == len(theirs)
    assert [ours.token(id) for id in range(ours.vocab_size)] == theirs.convert_ids_to_tokens(range(len(theirs)))


def test_text_is_that_of_transformers(pair):
    ours, theirs = pair

    @settings(max_examples=40, deadline=None)
    @given(st.lists(st.integers(0, ours.vocab_size + 3), max_size=20), st.booleans())
    def check(ids, skip):
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)

    check()


def test_token_bytes_joined_are_the_text(pair):
    ours, _ = pair
    if not ours.joins_bytes:
        with_bytes = [ours.id(f"<0x{byte:02X}>") for byte in (0xE6, 0x97, 0xA5)]
        assert ours.byte_ids >= set(with_bytes)
        assert ours.decode(with_bytes) == "日"
        return
    ids = list(range(ours.vocab_size))
    text = b"".join(map(ours.token_bytes, ids)).decode("utf-8", "replace")
    assert text == ours.decode(ids, skip_special_tokens=False)
    assert ours.token_bytes(ours.vocab_size) == b""


def test_tokenizer_that_transformers_saved(tmp_path):
    saved = PreTrainedTokenizerFast(tokenizer_object=adds_bos(byte_level()), pad_token="<pad>", **NAMED)
    saved.chat_template = TEMPLATE
    saved.save_pretrained(tmp_path)
    with Tokenizer.load(tmp_path) as ours:
        for text in TEXTS:
            assert ours.encode(text) == saved(text).input_ids
        assert ours.chat_text(CHAT).text == saved.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
        wanted = saved.apply_chat_template(CHAT, add_generation_prompt=True).input_ids
        # transformers makes tokens of what messages spell of them, as `encode` does of any text.
        assert ours.encode(ours.chat_text(CHAT).text, add_special_tokens=False) == wanted
        honest = [{**message, "content": message["content"].replace("<s>", "")} for message in CHAT]
        wanted = saved.apply_chat_template(honest, add_generation_prompt=True).input_ids
        assert ours.encode_chat(honest) == wanted
        assert ours.encode_chat(CHAT).count(ours.bos_id) == 1


def test_places_of_a_chat_template_in_order(tmp_path):
    listed = [{"name": "tool_use", "template": "with tools"}, {"name": "default", "template": "from the list"}]
    write(tmp_path, byte_level(), {**NAMED, "chat_template": listed})
    tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}
    for expected, file in [("from the list", None), ("from the file", "chat_template.jinja")]:
        if file:
            (tmp_path / file).write_text("from the file")
        theirs = AutoTokenizer.from_pretrained(tmp_path)
        with Tokenizer.load(tmp_path) as ours:
            assert ours.has_chat_template
            assert ours.chat_text(CHAT).text == theirs.apply_chat_template(CHAT, tokenize=False) == expected
            assert ours.chat_text(CHAT, tools=[tool]).text == theirs.apply_chat_template(
                CHAT, tokenize=False, tools=[tool]
            )


def test_a_template_that_is_given_replaces_those_of_the_folder(tmp_path):
    write(tmp_path, byte_level(), {**NAMED, "chat_template": [{"name": "tool_use", "template": "the folder's"}]})
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    with Tokenizer.load(tmp_path, chat_template="given {{ messages[0].role }}") as ours:
        assert ours.chat_text(CHAT).text == ours.chat_text(CHAT, tools=[tool]).text == f"given {CHAT[0]['role']}"


def test_missing_chat_template_says_what_to_do_and_what_there_is(tmp_path):
    tokenizer = Tokenizer.load(write(tmp_path, byte_level()))
    assert not tokenizer.has_chat_template
    with pytest.raises(ValueError, match=r"no chat template.*chat_template\.jinja"):
        tokenizer.chat_text(CHAT)
    folder = write(tmp_path, byte_level(), {"chat_template": [{"name": "rag", "template": "x"}]})
    with pytest.raises(ValueError, match=r"'default'.*rag"):
        Tokenizer.load(folder).chat_text(CHAT)


def test_missing_and_corrupt_files_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"has no tokenizer\.json.*skip_tokenizer_init"):
        Tokenizer.load(tmp_path)
    write(tmp_path, byte_level())
    whole = (tmp_path / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text(whole)
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json must hold a JSON object, but holds a list"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"eos_token": 2}, "eos_token"),
        ({"chat_template": 3}, "chat_template"),
        ({"chat_template": [{"name": "default"}]}, "chat_template"),
        ({"added_tokens_decoder": {"x": {"content": "a"}}}, "added_tokens_decoder"),
        ({"added_tokens_decoder": {"1": {"text": "a"}}}, r"added_tokens_decoder\[1\]"),
    ],
)
def test_wrong_entry_of_the_config_is_named(tmp_path, config, name):
    with pytest.raises(ValueError, match=name):
        Tokenizer.load(write(tmp_path, byte_level(), config))


def test_ids_and_text_out_of_range_are_refused(tmp_path):
    tokenizer = Tokenizer.load(write(tmp_path, byte_level()))
    for id in (-1, tokenizer.vocab_size, 2**40):
        assert id not in tokenizer
        with pytest.raises(ValueError, match=f"token id {id} is out of range"):
            tokenizer.token(id)
    with pytest.raises(ValueError, match="token id -1 is out of range"):
        tokenizer.decode([0, -1])
    with pytest.raises(ValueError, match="lone surrogate"):
        tokenizer.encode("half \ud83d")
    with pytest.raises(ValueError, match="must be a string, got list"):
        tokenizer.encode(["a"])


def test_other_threads_run_while_a_long_text_is_encoded_and_decoded():
    """The longest time for which a thread did not get on is a fraction of what the work took."""
    builtin = Tokenizer.load(BUILTIN)
    words = "".join(f"word{number} and {number * 7919} " for number in range(20_000))
    ids = builtin.encode(words)
    assert builtin.decode(ids, skip_special_tokens=False) == builtin._backend.decode(ids, skip_special_tokens=False)
    assert ids == builtin._backend.encode(words).ids
    took, longest = stalled_by(lambda: builtin.encode(words))
    assert longest < 0.5 * took


ANY_TEXT = st.text(st.characters(blacklist_categories=["Cs"]), max_size=400)


@given(ANY_TEXT | st.text("\n \t", max_size=400) | st.text("e\u0301\u1100\u1161", max_size=400))
@settings(max_examples=200, deadline=None)
def test_no_token_stands_for_more_characters_than_is_said(text):
    builtin = Tokenizer.load(BUILTIN)
    assert len(text) <= builtin.characters_per_token * len(builtin.encode(text, add_special_tokens=False))


def small_bpe(normalizer=None, cutter=None, tokens=(), missing=()):
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {token: id for id, token in enumerate([*sorted(set(alphabet) - set(missing)), "ab", "abc"])}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [("a", "b"), ("ab", "c")]))
    backend.pre_tokenizer = cutter or pre_tokenizers.ByteLevel(add_prefix_space=False)
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.add_tokens([tokenizers.AddedToken(text, **options) for text, options in tokens])
    return backend


def test_how_much_a_token_can_stand_for_is_told_only_where_no_character_gets_lost():
    assert max_characters_per_token(small_bpe()) == 3
    assert max_characters_per_token(small_bpe(tokens=[("<long one>", {})])) == 10
    for losing in (
        small_bpe(normalizer=normalizers.Strip()),
        small_bpe(tokens=[("<mask>", {"lstrip": True})]),
        small_bpe(missing="z"),
        small_bpe(
            cutter=pre_tokenizers.Sequence(
                [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
            )
        ),
        small_bpe(cutter=pre_tokenizers.Whitespace()),
        tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]")),
    ):
        assert max_characters_per_token(losing) is None


def stalled_by(work):
    """(seconds of `work`, longest seconds in which another thread did not run meanwhile)."""
    done = threading.Event()
    longest = 0.0
    started = threading.Event()

    def tick():
        nonlocal longest
        last = time.perf_counter()
        while not done.is_set():
            started.set()
            time.sleep(0.001)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now

    thread = threading.Thread(target=tick)
    thread.start()
    started.wait()
    start = time.perf_counter()
    work()
    took = time.perf_counter() - start
    done.set()
    thread.join()
    return took, longest
