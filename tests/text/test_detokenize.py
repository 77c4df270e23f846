"""Streaming text: joined it is the decode of all tokens up to a stop string, and nothing shown is taken back."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from strata.text.counted import counted
from strata.text.detokenize import IncrementalDetokenizer
from strata.text.special_tokens import SpecialTokens
from strata.text.tokenizer import Tokenizer
from tests.text.backends import byte_fallback, byte_level

CORPUS = [
    "The cat sat on the mat, and the dog sat by the door. Stop here.\n\nUser: what now?",
    "Größe naïve café 東京 日本語 привет мир 😀 👩‍👩‍👧 e\u0301",
    "def f(x):\n    return x + 1  # adds one\n",
]


def wrapped(backend: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(backend, SpecialTokens({}, (), ()), {})


def with_tool_call() -> Tokenizer:
    backend = byte_level(CORPUS, 400, ["<|end|>", "<|été|>"])
    backend.add_tokens([tokenizers.AddedToken("<tool call>", normalized=False)])
    return wrapped(backend)


def metaspace() -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>", "</s>"], show_progress=False)
    )
    return wrapped(backend)


TOKENIZERS = {
    "byte_level": with_tool_call(),
    "byte_fallback": wrapped(byte_fallback(CORPUS[:1], 360)),
    "metaspace": metaspace(),
}
each_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS.keys())

TEXTS = st.text(max_size=40) | st.text(alphabet="ab cé日😀👩‍\u0301\n<0x>Stop", max_size=40)


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Any ids, valid UTF-8 or not, special tokens and one past the vocabulary included; and ids of texts."""
    anything = st.lists(st.integers(0, tokenizer.vocab_size), max_size=40)
    return (
        anything | TEXTS.map(tokenizer.encode) | st.tuples(TEXTS, anything).map(lambda t: tokenizer.encode(t[0]) + t[1])
    )


def expected(
    tokenizer: Tokenizer, ids: list[int], stops: tuple[str, ...], include: bool, skip: bool
) -> tuple[str, str | None]:
    """By decoding everything anew after each token: the text, and the stop string that ended it."""
    for count in range(len(ids) + 1):
        text = tokenizer.decode(ids[:count], skip_special_tokens=skip)
        ends = sorted((text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text)
        if ends:
            end, start, stop = ends[0]
            return text[: end if include else start], stop
    return tokenizer.decode(ids, skip_special_tokens=skip), None


def append_all(detokenizer, ids):
    return "".join([detokenizer.append(id) for id in ids])


def stream(detokenizer: IncrementalDetokenizer, ids: list[int]) -> list[str]:
    return [detokenizer.append(id) for id in ids] + [detokenizer.finish()]


@each_tokenizer
@settings(max_examples=150, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_joined_deltas_are_the_decode_of_all_ids(tokenizer, data, skip):
    ids = data.draw(ids_of(tokenizer))
    deltas = stream(IncrementalDetokenizer(tokenizer, [], skip_special_tokens=skip), ids)
    assert "".join(deltas) == tokenizer.decode(ids, skip_special_tokens=skip)


@each_tokenizer
@settings(max_examples=150, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_text_writes_on_from_the_prompt(tokenizer, data, skip):
    """Prompts are whole texts here: one that ends within a character has no text to write on from."""
    prompt = tokenizer.encode(data.draw(st.text(alphabet="abc T", min_size=1, max_size=8)))
    ids = data.draw(ids_of(tokenizer))
    deltas = stream(IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skip), ids)
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    assert before + "".join(deltas) == tokenizer.decode(prompt + ids, skip_special_tokens=skip)


@each_tokenizer
@settings(max_examples=300, deadline=None)
@given(data=st.data(), include=st.booleans(), skip=st.booleans())
def test_stop_string_cuts_the_text_and_nothing_shown_is_taken_back(tokenizer, data, include, skip):
    ids = data.draw(ids_of(tokenizer))
    text = tokenizer.decode(ids, skip_special_tokens=skip).replace("\ufffd", "")
    cuts = st.tuples(st.integers(0, max(len(text) - 1, 0)), st.integers(1, 6)).map(lambda c: text[c[0] : c[0] + c[1]])
    stop = tuple(data.draw(st.lists((cuts | st.text("ab c日\n", min_size=1, max_size=3)).filter(bool), max_size=3)))
    final, stopped = expected(tokenizer, ids, stop, include, skip)
    detokenizer = IncrementalDetokenizer(tokenizer, [], stop, include, skip)
    shown = ""
    for delta in stream(detokenizer, ids):
        shown += delta
        assert final.startswith(shown)
    assert shown == final
    assert detokenizer.stopped == stopped


@each_tokenizer
def test_stop_string_is_found_at_the_token_that_completes_it(tokenizer):
    ids = tokenizer.encode("the cat sat\nUser: 日本")
    for stop in ("cat", "\n", "at\nU", "User:", "日"):
        first = next(n for n in range(len(ids) + 1) if stop in tokenizer.decode(ids[:n]))
        detokenizer = IncrementalDetokenizer(tokenizer, [], (stop,))
        append_all(detokenizer, ids[: first - 1])
        assert detokenizer.stopped is None
        detokenizer.append(ids[first - 1])
        assert detokenizer.stopped == stop
        assert append_all(detokenizer, ids[first:]) + detokenizer.finish() == ""


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_character_of_several_tokens_is_shown_whole(name):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode("a🦖a")
    assert len(ids) > 4
    deltas = stream(IncrementalDetokenizer(tokenizer, []), ids)
    assert [delta for delta in deltas if "🦖" in delta or "\ufffd" in delta] in (["🦖"], ["🦖a"])


def test_text_that_could_begin_a_stop_string_is_shown_once_it_cannot():
    tokenizer = TOKENIZERS["byte_level"]
    detokenizer = IncrementalDetokenizer(tokenizer, [], ("abcx",))
    shown = [append_all(detokenizer, tokenizer.encode(letter)) for letter in "zababcab"]
    assert shown == ["z", "", "", "ab", "", "", "abc", ""]
    assert detokenizer.finish() == "ab"


def test_prompt_keeps_the_space_of_the_first_word():
    tokenizer = TOKENIZERS["byte_fallback"]
    word = tokenizer.encode("cat")
    assert "".join(stream(IncrementalDetokenizer(tokenizer, tokenizer.encode("the")), word)) == " cat"
    assert "".join(stream(IncrementalDetokenizer(tokenizer, []), word)) == "cat"
    beginning = [tokenizer.id("<s>")]
    assert "".join(stream(IncrementalDetokenizer(tokenizer, beginning), word)) == "cat"


def test_stop_strings_do_not_count_within_min_tokens():
    tokenizer = TOKENIZERS["byte_level"]
    ids = [tokenizer.encode(letter)[0] for letter in "axbxc"]
    detokenizer = IncrementalDetokenizer(tokenizer, [], ("x",), min_tokens=2)
    assert append_all(detokenizer, ids) + detokenizer.finish() == "axb"
    assert detokenizer.stopped == "x"
    short = IncrementalDetokenizer(tokenizer, [], ("x",), min_tokens=9)
    assert append_all(short, ids) + short.finish() == "axbxc"
    assert short.stopped is None


@pytest.mark.parametrize(
    ("number", "nouns", "words"),
    [
        (1, ("token",), "1 token"),
        (0, ("token",), "0 tokens"),
        (1234, ("token",), "1,234 tokens"),
        (1.2, ("token",), "1 token"),  # as it is shown
        (1.7, ("token",), "2 tokens"),
        (1, ("prefix", "prefixes"), "1 prefix"),
        (2, ("prefix", "prefixes"), "2 prefixes"),
    ],
)
def test_the_noun_has_the_number_that_is_shown(number: float, nouns: tuple[str, ...], words: str) -> None:
    assert counted(number, *nouns) == words
