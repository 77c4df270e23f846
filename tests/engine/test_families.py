"""Every family through the paged engine: greedy tokens equal to transformers', with chunked prefill and prefix hits."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from strata import LLM, SamplingParams
from tests.models.checkpoints import FAMILY_CONFIGS, load_oracle, make_checkpoint

OUTPUT = 64


@pytest.mark.parametrize(("name", "config"), FAMILY_CONFIGS, ids=[name for name, _ in FAMILY_CONFIGS])
def test_64_greedy_tokens_of_20_prompts(name: str, config: dict, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / name, config)
    length = config["max_position_embeddings"]
    output = min(OUTPUT, length - 40)
    rng = random.Random(name)
    shared = [rng.randrange(config["vocab_size"]) for _ in range(20)]
    prompts = []
    for index in range(20):
        own = [rng.randrange(config["vocab_size"]) for _ in range(rng.randrange(1, min(60, length - output - 20)))]
        prompts.append(shared + own if index % 2 else own)
    llm = LLM(folder, device="cpu", dtype="float32", num_pages=160, max_num_batched_tokens=48, skip_tokenizer_init=True)
    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    got = [out.outputs[0].token_ids for out in llm.generate(asked, params, use_tqdm=False)]
    assert llm.engine.loop.scheduler.statistics.prefix_hits > 0
    oracle = load_oracle(folder)
    assert got == [greedy(oracle, prompt, ids) for prompt, ids in zip(prompts, got, strict=True)]


def greedy(oracle: torch.nn.Module, prompt: list[int], ids: list[int]) -> list[int]:
    """What transformers chooses after the prompt and each of `ids`: equal to `ids` only if every choice agrees."""
    with torch.no_grad():
        logits = oracle(torch.tensor([prompt + ids])).logits[0]
    return logits[len(prompt) - 1 : -1].argmax(-1).tolist()
