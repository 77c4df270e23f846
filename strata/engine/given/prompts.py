"""Prompts as somebody gives them to `LLM`: text or token ids, one or several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, TypeGuard, cast

Prompt = str | Mapping[str, Any] | Sequence[int]

_ACCEPTED = 'a string, a list of token ids, {"prompt": ...} or {"prompt_token_ids": [...]}'


def listed_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One or several as a list. Raises ValueError for what is neither."""
    if not isinstance(prompts, (str, Mapping)) and not is_list(prompts):
        raise ValueError(f"prompts must be {_ACCEPTED}, or a list of such prompts, got {prompts!r}")
    is_one = isinstance(prompts, (str, Mapping)) or (bool(prompts) and isinstance(prompts[0], Integral))
    return cast(list[Prompt], [prompts] if is_one else list(prompts))


def text_and_ids(prompt: Prompt) -> tuple[str | None, list[int] | None]:
    """Of one prompt: one of them, or both, where it has both. Raises ValueError for what is no prompt."""
    if isinstance(prompt, str):
        return prompt, None
    if is_list(prompt):
        return None, listed_integers(prompt, "prompt_token_ids")
    # What is None asks for nothing, such as vLLM's multi_modal_data.
    given = {key: one for key, one in prompt.items() if one is not None} if isinstance(prompt, Mapping) else {}
    if not given or set(given) - {"prompt", "prompt_token_ids"}:
        raise ValueError(f"a prompt must be {_ACCEPTED}, got {prompt!r}")
    text, ids = given.get("prompt"), given.get("prompt_token_ids")
    if not isinstance(text, str) and not (text is None and ids is not None):
        raise ValueError(f"the text of a prompt must be a string, got {text!r}")
    return text, None if ids is None else listed_integers(ids, "prompt_token_ids")


def listed_integers(given: object, name: str) -> list[int]:
    """Integers in a row as plain ones, as ranks tell each other of. Raises ValueError, with the name, for others."""
    if not is_list(given):
        raise ValueError(f"{name} must be a list of integers, got {given!r}")
    for one in given:
        if type(one) is not int and (not isinstance(one, Integral) or isinstance(one, bool)):
            raise ValueError(f"{name} must be integers, got {one!r}")
    return [int(one) for one in given]


def is_list(given: object) -> TypeGuard[Sequence[Any]]:
    """Bytes are numbers in a row too, and none that a tokenizer has made."""
    return isinstance(given, Sequence) and not isinstance(given, (str, bytes, bytearray, memoryview))
