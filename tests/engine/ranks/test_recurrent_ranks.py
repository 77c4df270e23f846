"""Recurrent layers over ranks through the engine: each rank keeps the states of its own heads, and tokens are those of
one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from strata import LLM, SamplingParams
from tests.models.recurrent_checkpoints import RECURRENT_CONFIGS

OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "device": "cpu",
    "dtype": "float32",
    "num_pages": 32,
    "max_model_len": 160,
    "max_num_batched_tokens": 24,
    "verbose": False,
}
# The second is the first and more: a state is found at the end of what they share.
PROMPTS = [[(7 * place + 3) % 97 for place in range(length)] for length in (40, 72, 5)]


def ids(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    return [llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids for prompt in PROMPTS]


@pytest.mark.parametrize("name", ["granite-hybrid-experts", "qwen3-next"])
def test_ranks_have_the_tokens_of_one(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(RECURRENT_CONFIGS[name] | {"intermediate_size": 32}))
    one = LLM(tmp_path, **OPTIONS)
    two = LLM(tmp_path, tensor_parallel_size=2, **OPTIONS)
    assert ids(two) == ids(one)
    assert two.engine.ranks is not None
    two.engine.ranks.check_ids()
    ledgers = [llm.engine.ledger for llm in (two, one)]
    assert 0.4 < ledgers[0].states / ledgers[1].states < 0.7
