"""Prompts as somebody gives them to `LLM`: text or token ids, one or several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard, cast

Prompt = str | Mapping[str, Any] | Sequence[int]

_ACCEPTED = 'a string, a list of token ids, {"prompt": ...} or {"prompt_token_ids": [...]}'


def listed_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One or several as a list. Raises ValueError for what is neither."""
    if not isinstance(prompts, (str, Mapping)) and not _is_list(prompts):
        raise ValueError(f"prompts must be {_ACCEPTED}, or a list of such prompts, got {prompts!r}")
    is_one = isinstance(prompts, (str, Mapping)) or (bool(prompts) and isinstance(prompts[0], int))
    return cast(list[Prompt], [prompts] if is_one else list(prompts))


def text_and_ids(prompt: Prompt) -> tuple[str | None, list[int] | None]:
    """Of one prompt: one of them, or both, where it has both. Raises ValueError for what is no prompt."""
    if isinstance(prompt, str):
        return prompt, None
    if _is_list(prompt):
        return None, _checked_ids(prompt)
    if not isinstance(prompt, Mapping) or not prompt or set(prompt) - {"prompt", "prompt_token_ids"}:
        raise ValueError(f"a prompt must be {_ACCEPTED}, got {prompt!r}")
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if not isinstance(text, str) and not (text is None and ids is not None):
        raise ValueError(f"the text of a prompt must be a string, got {text!r}")
    if ids is not None and not _is_list(ids):
        raise ValueError(f"prompt_token_ids must be a list of token ids, got {ids!r}")
    return text, None if ids is None else _checked_ids(ids)


def _is_list(given: object) -> TypeGuard[Sequence[Any]]:
    """Bytes are numbers in a row too, and none that a tokenizer has made."""
    return isinstance(given, Sequence) and not isinstance(given, (str, bytes, bytearray, memoryview))


def _checked_ids(ids: Sequence[int]) -> list[int]:
    for id in ids:
        if not isinstance(id, int) or isinstance(id, bool):
            raise ValueError(f"token id {id!r} is no integer")
    return [int(id) for id in ids]  # ranks tell each other of plain ones
