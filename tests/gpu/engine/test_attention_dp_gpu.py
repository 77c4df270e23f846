"""Ranks with sequences of their own, each on a GPU, answer as one GPU does, from captured steps."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest

from strata import LLM, SamplingParams
from tests.engine.ranks.layouts import CONFIG
from tests.gpu.ranks import require_gpus

pytestmark = pytest.mark.gpu

SIZES = {"hidden_size": 256, "head_dim": 64, "moe_intermediate_size": 128, "num_experts": 8}
OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 128,
    "seed": 0,
    "verbose": False,
}
PROMPTS = [[(step * place + 3) % 500 for place in range(length)] for length, step in ((150, 7), (5, 5), (90, 11))]


def ids(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    outputs = llm.generate(PROMPTS * 2, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def test_two_gpus_with_sequences_of_their_own_answer_as_one(tmp_path: Path) -> None:
    require_gpus(2)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | SIZES))
    one = LLM(tmp_path, num_pages=100, **OPTIONS)
    wanted = ids(one)
    del one
    gc.collect()
    ranked = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "enable_dp_attention": True}
    two = LLM(tmp_path, num_pages=40, **ranked, **OPTIONS)
    assert ids(two) == wanted
    assert two.engine.captured is not None
    assert set(two.engine.captured.uncaptured.values()) == {0}
