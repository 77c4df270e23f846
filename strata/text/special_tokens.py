"""Which tokens are special, as a checkpoint folder's tokenizer_config.json and special_tokens_map.json say it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from strata.files.json_object import read_object

_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_TRAITS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True)
class SpecialTokens:
    """The special tokens that have a name, the others, and the added tokens that the config lists with their ids."""

    named: dict[str, AddedToken]
    extra: tuple[AddedToken, ...]
    listed: tuple[AddedToken, ...]

    @property
    def texts(self) -> dict[str, str]:
        """What chat templates see: "bos_token" and the like to their text."""
        return {name: token.content for name, token in self.named.items()}

    def add_to(self, backend: tokenizers.Tokenizer) -> None:
        """Make them added tokens where tokenizer.json does not have them, or has them with other traits."""
        present = backend.get_added_tokens_decoder().values()
        traits, texts = {repr(token) for token in present}, {token.content for token in present}
        missing = [token for token in self.listed if repr(token) not in traits]
        texts.update(token.content for token in missing)
        for token in (*self.named.values(), *self.extra):
            if token.content not in texts:
                texts.add(token.content)
                missing.append(token)
        if missing:
            backend.add_tokens(missing)


def read_special_tokens(folder: Path, config: dict[str, Any]) -> SpecialTokens:
    """`config` is tokenizer_config.json. special_tokens_map.json counts only where the config lists no added tokens."""
    listed = config.get("added_tokens_decoder")
    where = folder / "tokenizer_config.json"
    if listed is None:
        where = folder / "special_tokens_map.json"
        config = {**config, **read_object(where)}
    elif not isinstance(listed, dict) or not all(id.isdecimal() for id in listed):
        raise ValueError(f"{where}: added_tokens_decoder must map token ids to tokens")
    ordered = sorted((listed or {}).items(), key=lambda entry: int(entry[0]))
    added = tuple(_token(value, where, f"added_tokens_decoder[{id}]") for id, value in ordered)
    named = {name: _token(config[name], where, name, special=True) for name in _NAMES if config.get(name) is not None}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    # In the form of an object the tokens have names of their own; transformers keeps those apart from the vocabulary.
    extra = extra if isinstance(extra, list) else []
    return SpecialTokens(
        named, tuple(_token(value, where, "additional_special_tokens", special=True) for value in extra), added
    )


def _token(value: Any, where: Path, name: str, **traits: bool) -> AddedToken:
    if isinstance(value, str):
        return AddedToken(value, **traits)
    if isinstance(value, dict) and isinstance(value.get("content"), str):
        given = {trait: value[trait] for trait in _TRAITS if isinstance(value.get(trait), bool)}
        return AddedToken(value["content"], **{**given, **traits})
    raise ValueError(f'{where}: {name} must be a string or an object with "content", got {value!r}')
