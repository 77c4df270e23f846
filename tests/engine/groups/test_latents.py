"""An engine whose layers keep one row a token: its pages are small, and forks, preemption and prefixes find theirs."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata import LLM, SamplingParams
from tests.models.checkpoints import FAMILY_CONFIGS, make_checkpoint

CONFIG = dict(FAMILY_CONFIGS)["deepseek-v3-groups-yarn"]
OPTIONS = {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("latents"), CONFIG)


def ids(llm: LLM) -> list[list[int]]:
    shared = [(11 * place) % 100 for place in range(37)]
    prompts = [shared[: 5 + number * 3] + [number] * (number % 5 * 9) for number in range(8)]
    params = [
        SamplingParams(n=3 if number % 3 == 0 else 1, temperature=0.8, seed=number, max_tokens=18, ignore_eos=True)
        for number in range(len(prompts))
    ]
    found = []
    for _ in range(2):  # the second time with cached prefixes
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        found += [sample.token_ids for output in outputs for sample in output.outputs]
    return found


def test_forks_preemption_and_prefixes_find_their_rows(folder: Path) -> None:
    wanted = ids(LLM(folder, num_pages=300, **OPTIONS))
    tight = LLM(folder, num_pages=14, max_num_batched_tokens=40, **OPTIONS)
    assert ids(tight) == wanted
    counted = tight.engine.loop.scheduler.statistics
    assert counted.preemptions > 0
    assert counted.prefix_hits > 0


def test_a_page_holds_one_row_a_token(folder: Path) -> None:
    llm = LLM(folder, num_pages=20, **OPTIONS)
    row = 4 * (CONFIG["kv_lora_rank"] + CONFIG["qk_rope_head_dim"])
    pool = llm.engine.loop._runner.pool
    assert pool.shape.page_bytes == CONFIG["num_hidden_layers"] * 16 * row
    assert pool.all_values is pool.all_keys
    assert pool.all_keys.nbytes == 20 * pool.shape.page_bytes
    pool.all_keys.normal_()
    before = pool.all_keys.clone()
    pool.copy_pages([(3, 7), (5, 2)])
    before[:, [7, 2]] = before[:, [3, 5]]
    assert pool.all_keys.equal(before)


def test_bits_do_not_depend_on_company_chunks_or_cached_prefixes(folder: Path) -> None:
    prompt = [(7 * place) % 101 for place in range(45)]
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=1, ignore_eos=True)
    others = [[number] * (3 + 11 * number) for number in range(4)]

    def signature(llm: LLM, asked: list[list[int]]) -> list[float]:
        outputs = llm.generate([{"prompt_token_ids": one} for one in asked], params, use_tqdm=False)
        entries = outputs[asked.index(prompt)].outputs[0].logprobs
        assert entries is not None
        return [entry.logprob for each in entries for entry in each.values()]

    def made(**more: int) -> LLM:
        return LLM(folder, num_pages=100, deterministic=True, seed=0, **OPTIONS, **more)

    alone = signature(made(), [prompt])
    crowded = made(max_num_batched_tokens=17)
    assert signature(crowded, [*others, prompt]) == alone
    assert signature(crowded, [prompt, others[0]]) == alone  # with its prefix cached
