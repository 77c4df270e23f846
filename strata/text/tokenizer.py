"""Text to token ids and back, from the tokenizer files of a checkpoint folder, as transformers treats them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack

import tokenizers
from tokenizers import models, pre_tokenizers

from strata.files.hub_cache import why_no_folder
from strata.files.json_object import read_object
from strata.text.chat_template import ChatOptions, Rendering, TemplateRenderer
from strata.text.messages import Message
from strata.text.special_tokens import SpecialTokens, read_special_tokens
from strata.text.spelled_tokens import ChatText, SpelledTokens

_SHORT = 1000  # characters or ids, which take a millisecond at most
# What keeps every character of a text, whether it cuts before it or after.
_KEEPING = {"ByteLevel", "Digits", "Split", "Punctuation"}


class Tokenizer:
    """A tokenizer with its special tokens and chat template. Use as a context manager, or `close` when done with chat.

    bos_id, pad_id: of the beginning of a sequence and of padding, None if there is none.
    eos_ids: the tokenizer's own end-of-sequence id in a tuple, empty if there is none. (generation_config.json and
        config.json may name others.)
    special_ids: ids that `skip_special_tokens` leaves out.
    vocab_size: one more than the highest id; a model may have more rows than that, as padding.
    """

    def __init__(self, backend: tokenizers.Tokenizer, special: SpecialTokens, templates: Mapping[str, str]) -> None:
        special.add_to(backend)
        # A prompt is never cut or padded silently, whatever limits the file was saved with.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._special = special
        self._templates = dict(templates)
        self._renderer = TemplateRenderer()
        self._bytes: dict[int, bytes] = {}
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        self._spelled = SpelledTokens(token.content for token in added.values() if token.special)
        self._plain: dict[str, list[int]] = {}
        self.vocab_size = 1 + max(backend.get_vocab().values(), default=-1)
        self.bos_id = self._named_id("bos_token")
        self.pad_id = self._named_id("pad_token")
        eos_id = self._named_id("eos_token")
        self.eos_ids = () if eos_id is None else (eos_id,)

    @classmethod
    def load(cls, folder: str | Path, chat_template: str | None = None) -> Tokenizer:
        """Read tokenizer.json and, where present, tokenizer_config.json, special_tokens_map.json, chat_template.jinja.

        chat_template: the text of one that is used instead of the folder's.
        tokenizer.json's post-processor alone decides which special tokens `encode` adds: like transformers (>= 5),
        this ignores add_bos_token and add_eos_token. Raises ValueError for what is missing or corrupt.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise ValueError(f"{why_no_folder(folder)}; give a folder with a tokenizer.json")
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ValueError(
                f"{folder} has no tokenizer.json: save the tokenizer in that form "
                "(AutoTokenizer.from_pretrained(...).save_pretrained(folder)); from Python, "
                "LLM(..., skip_tokenizer_init=True) takes token ids and needs none"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{path} is not a tokenizer that the tokenizers library can read: {error}") from None
        config = read_object(folder / "tokenizer_config.json")
        templates = {"default": chat_template} if chat_template is not None else read_templates(folder, config)
        return cls(backend, read_special_tokens(folder, config), templates)

    def encode(self, text: str | ChatText, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written out in it become their ids, but for what messages spell of them.

        Other threads run while a long text is encoded, or many ids are decoded.
        """
        spelled: tuple[tuple[int, int], ...] = ()
        if isinstance(text, ChatText):
            spelled, text = text.spelled, text.text
        if not isinstance(text, str):
            raise ValueError(f"the text to encode must be a string, got {type(text).__name__}")
        try:
            if spelled:
                return self._encode_between(text, spelled, add_special_tokens)
            if len(text) <= _SHORT:
                return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
            # Unlike `encode`, this lets go of the interpreter; unlike `encode_batch`, it keeps no places in the text.
            return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except TypeError:  # how the library names a str that has no UTF-8
            raise ValueError("the text holds a lone surrogate, which is half a character: remove it") from None

    def _encode_between(self, text: str, spelled: Sequence[tuple[int, int]], add_special_tokens: bool) -> list[int]:
        """Token ids of a text in which these places are no special tokens."""
        parts, place = [], 0
        for begin, end in spelled:
            parts.append(text[place:begin])
            place = max(place, end)
        parts.append(text[place:])
        encoded = self._backend.encode_batch_fast(parts, add_special_tokens=False)
        ids = list(encoded[0].ids)
        for (begin, end), part in zip(spelled, encoded[1:], strict=True):
            ids += self._plain_ids(text[begin:end])
            ids += part.ids
        if add_special_tokens:
            around = self._backend.encode("a")
            first = around.special_tokens_mask.index(0)
            last = len(around) - around.special_tokens_mask[::-1].index(0)
            ids = [*around.ids[:first], *ids, *around.ids[last:]]
        return ids

    def _plain_ids(self, token: str) -> list[int]:
        """The ids of a special token's spelling as of any other text."""
        found = self._plain.get(token)
        if found is None:
            backend = self._backend
            text = token if backend.normalizer is None else backend.normalizer.normalize_str(token)
            cutter = backend.pre_tokenizer
            words = [text] if cutter is None else [word for word, _ in cutter.pre_tokenize_str(text)]
            found = self._plain[token] = [one.id for word in words for one in backend.model.tokenize(word)]
        return found

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`. An id past the vocabulary, which a padded model can produce, has no text."""
        if (wrong := next((id for id in ids if not 0 <= id < 2**32), None)) is not None:
            raise ValueError(f"token id {wrong} is out of range: the vocabulary has ids 0 to {self.vocab_size - 1}")
        if len(ids) <= _SHORT:
            return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]

    def token(self, id: int) -> str:
        """The token as the vocabulary writes it (not its text)."""
        token = self._backend.id_to_token(id) if 0 <= id < self.vocab_size else None
        if token is None:
            raise ValueError(f"token id {id} is out of range: the vocabulary has ids 0 to {self.vocab_size - 1}")
        return token

    def id(self, token: str) -> int | None:
        """The id of a token as the vocabulary writes it, None if it has none."""
        return self._backend.token_to_id(token)

    @cached_property
    def characters_per_token(self) -> int | None:
        """The most characters of a text that one token stands for, None if that is not bounded."""
        return max_characters_per_token(self._backend)

    def __contains__(self, id: int) -> bool:
        return 0 <= id < self.vocab_size and self._backend.id_to_token(id) is not None

    @cached_property
    def joins_bytes(self) -> bool:
        """Whether text is just the bytes of the tokens one after another (byte-level BPE; see `token_bytes`)."""
        return self._decoder_types == ["ByteLevel"]

    def token_bytes(self, id: int) -> bytes:
        """What a token of byte-level BPE adds to the UTF-8 bytes of the text; nothing for an id without a token."""
        found = self._bytes.get(id)
        if found is None:
            token = self.token(id) if id in self else ""
            try:
                found = bytes(map(_BYTE_OF_CHARACTER.__getitem__, token))
            except KeyError:  # an added token stands for itself
                found = token.encode()
            self._bytes[id] = found
        return found

    @cached_property
    def byte_ids(self) -> frozenset[int]:
        """Tokens that stand for one byte, when the tokenizer writes rare characters as runs of them (byte fallback)."""
        if "ByteFallback" not in self._decoder_types:
            return frozenset()
        ids = (self.id(f"<0x{byte:02X}>") for byte in range(256))
        return frozenset(id for id in ids if id is not None)

    def to_json(self) -> str:
        """The text of a tokenizer.json that has all special tokens, also those that other files name."""
        return self._backend.to_str()

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    def template_names(self, field: str) -> bool:
        """Whether a chat template has the word as a name of an object's field, and so may read this one of messages."""
        word = re.compile(rf"[.'\"]{re.escape(field)}(?!\w)")
        return any(word.search(template) for template in self._templates.values())

    def chat_text(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> ChatText:
        """Messages ({"role": ..., "content": ...}) as the text that the model's chat template makes of them, with the
        places where they spell special tokens, for `encode`.
        """
        return self._renderer.render(self.rendering(messages, **options))

    def rendering(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> Rendering:
        """What `chat_text` has rendered, for a renderer of one's own."""
        template = options.get("chat_template")
        return Rendering.of_chat(
            self._template(bool(options.get("tools"))) if template is None else template,
            messages,
            special_tokens=self._special.texts,
            spelled=None if options.get("parse_special_tokens") else self._spelled,
            **options,
        )

    def encode_chat(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> list[int]:
        """Token ids of `chat_text`. Nothing is added: the template writes the special tokens itself. What messages
        spell of them is text.
        """
        return self.encode(self.chat_text(messages, **options), add_special_tokens=False)

    def close(self) -> None:
        """End the process that renders chat templates."""
        self._renderer.close()

    def __enter__(self) -> Tokenizer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @cached_property
    def _decoder_types(self) -> list[str]:
        if self._backend.decoder is None:
            return []
        state = json.loads(self._backend.decoder.__getstate__())
        return [part["type"] for part in state.get("decoders", [state])]

    def _named_id(self, name: str) -> int | None:
        text = self._special.texts.get(name)
        return None if text is None else self.id(text)

    def _template(self, with_tools: bool) -> str:
        if not self._templates:
            raise ValueError(
                "this model has no chat template: give it the prompt as a text (generate, /v1/completions), "
                "or a template (chat_template.jinja in the model folder, strata serve --chat-template)"
            )
        if with_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" not in self._templates:
            raise ValueError(f"no chat template is named 'default' in this model, only {sorted(self._templates)}")
        return self._templates["default"]


def has_chat_template(folder: str | Path) -> bool:
    """Whether a tokenizer's folder brings one, without loading the tokenizer."""
    return bool(read_templates(Path(folder), read_object(Path(folder) / "tokenizer_config.json")))


def read_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name. Files of their own come before the entry in `config`, the tokenizer_config.json."""
    files = {"default": folder / "chat_template.jinja"}
    files.update((path.stem, path) for path in sorted((folder / "additional_chat_templates").glob("*.jinja")))
    from_files = {name: path.read_text(encoding="utf-8-sig") for name, path in files.items() if path.is_file()}
    if from_files:
        return from_files
    given = config.get("chat_template")
    if given is None:
        return {}
    if isinstance(given, str):
        return {"default": given}
    entries = [one for one in given if isinstance(one, dict)] if isinstance(given, list) else []
    named = [(entry.get("name"), entry.get("template")) for entry in entries]
    templates = {name: text for name, text in named if isinstance(name, str) and isinstance(text, str)}
    if not templates or len(templates) != len(given):
        raise ValueError(
            f"{folder / 'tokenizer_config.json'}: chat_template must be a string "
            'or a list of {"name": ..., "template": ...} with different names'
        )
    return templates


def _byte_characters() -> dict[str, int]:
    """GPT-2's alphabet: printable characters of Latin-1 stand for their own byte, the others for 256, 257, ..."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + number): byte for number, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_characters()


def max_characters_per_token(backend: tokenizers.Tokenizer) -> int | None:
    """The most characters of a text that one token stands for; None where that has no end, or is not known.

    It is known of byte-level BPE that takes a text as it is. Elsewhere characters may be left out, or drawn together.
    """
    model, cutter = backend.model, backend.pre_tokenizer
    if not isinstance(model, models.BPE) or model.unk_token is not None or backend.normalizer is not None:
        return None
    steps = list(_steps(json.loads(cutter.__getstate__()))) if cutter is not None else []
    kinds = {step["type"] for step in steps}
    removing = any(step.get("behavior") == "Removed" for step in steps)
    stripping = any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())
    vocabulary = backend.get_vocab()
    if "ByteLevel" not in kinds or not kinds <= _KEEPING or removing or stripping:
        return None
    if not vocabulary.keys() >= set(pre_tokenizers.ByteLevel.alphabet()):  # a byte without a token is left out
        return None
    return max(map(len, vocabulary))


def _steps(state: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if state["type"] == "Sequence":
        for inner in state["pretokenizers"]:
            yield from _steps(inner)
    else:
        yield state
