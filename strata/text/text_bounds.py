"""How much text a token can stand for: what is longer than so many tokens can hold need not be tokenized to know it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers

# What keeps every character of a text, whether it cuts before it or after.
_KEEPING = {"ByteLevel", "Digits", "Split", "Punctuation"}


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
