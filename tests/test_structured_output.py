"""The benchmark of constrained decoding, small and on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks import structured_output
from strata import LLM


def test_the_made_up_tokenizer_has_every_entry_and_writes_any_text() -> None:
    tokenizer = structured_output.made_up_tokenizer(5000, 4321)
    assert sorted(tokenizer.get_vocab().values()) == list(range(5000))
    assert tokenizer.token_to_id("<end>") == 4321
    text = 'größe: {"a": [1, 東京]}\n'
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_both_kinds_are_measured(engine: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured_output, "PROMPT_TOKENS", 20)
    result = structured_output.measure(engine(dtype="float32"), requests=3, output=12, repeat=3, bounded=False)
    assert [len(result["all"][kind]) for kind in ("free", "constrained")] == [3, 3]
    assert result["ratio"] == result["constrained"] / result["free"] > 0
    assert result["test"] == "structured-output-b3"
