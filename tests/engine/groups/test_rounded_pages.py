"""Pages in 8 bits and pages of latents: the same ids however a prompt was cut, found, preempted or forked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from strata import LLM, SamplingParams
from tests.engine.test_answers import ids
from tests.models.checkpoints import FAMILY_CONFIGS, load_oracle, make_checkpoint
from tests.models.recurrent_checkpoints import RECURRENT_CONFIGS

CONFIGS = dict(FAMILY_CONFIGS)


@pytest.fixture(scope="module", params=["llama-llama3", "gemma3-local-global"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("rounded") / request.param, CONFIGS[request.param])


def engine(folder: Path, **options: object) -> LLM:
    sizes = {"num_pages": 90, "max_num_seqs": 8, "page_size": 4, "kv_cache_dtype": "fp8", "dtype": "float32"}
    return LLM(folder, device="cpu", skip_tokenizer_init=True, verbose=False, **(sizes | options))


PROMPTS = [[(7 * at + 3) % 80 for at in range(length)] + [length] for length in (5, 30, 40, 17)]


def generated(llm: LLM) -> list[list[list[int]]]:
    """Prompts that begin alike, samples that fork; the second round finds what the first has left."""
    params = SamplingParams(n=2, temperature=0.8, seed=1, max_tokens=48, ignore_eos=True)
    asked = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    rounds = [llm.generate(asked, params, use_tqdm=False) for _ in range(2)]
    return [[output.token_ids for output in one.outputs] for outputs in rounds for one in outputs]


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_company_and_cuts_change_no_id(folder: Path, kind: str) -> None:
    expected = generated(engine(folder, kv_cache_dtype=kind, num_pages=400, enable_prefix_caching=False))
    tight = engine(folder, kv_cache_dtype=kind, max_num_batched_tokens=16)
    assert generated(tight) == expected
    counted = tight.engine.loop.scheduler.statistics
    assert counted.preemptions > 0
    assert counted.prefix_hits > 0


class RoundingCache(DynamicCache):
    """A cache of transformers that rounds what it is given by float64 arithmetic of its own."""

    def update(self, keys: Tensor, values: Tensor, *others: Any, **more: Any) -> tuple[Tensor, Tensor]:
        return super().update(_rounded(keys), _rounded(values), *others, **more)


def _rounded(rows: Tensor) -> Tensor:
    powers = torch.exp2(torch.ceil(torch.log2(rows.abs().amax(-1, keepdim=True).double() / 448)))
    return ((rows.double() / powers).to(torch.float8_e4m3fn).double() * powers).to(rows.dtype)


def test_greedy_ids_equal_transformers_with_a_cache_that_rounds(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "llama", CONFIGS["llama-llama3"])
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    asked = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    ours = [one.outputs[0].token_ids for one in engine(folder, num_pages=400).generate(asked, params, use_tqdm=False)]
    oracle = load_oracle(folder)
    theirs = []
    for prompt in PROMPTS:
        given = torch.tensor([prompt])
        made = oracle.generate(
            given, past_key_values=RoundingCache(), do_sample=False, max_new_tokens=48, eos_token_id=None
        )
        theirs.append(made[0, len(prompt) :].tolist())
    assert ours == theirs
    plain = engine(folder, num_pages=400, kv_cache_dtype="auto").generate(asked, params, use_tqdm=False)
    assert [one.outputs[0].token_ids for one in plain] != ours  # the rounding is seen


def test_pages_are_half_as_large_and_what_cannot_be_is_refused(folder: Path) -> None:
    plain, rounded = (engine(folder, kv_cache_dtype=kind, dtype="bfloat16") for kind in ("auto", "int8"))
    head_dim = plain.engine.config.head_dim
    assert rounded.engine.ledger.page_bytes * 2 * head_dim == plain.engine.ledger.page_bytes * (head_dim + 1)
    with pytest.raises(ValueError, match="kv_cache_dtype 'fp4' is unknown; use auto, fp8, fp8_e4m3, int8"):
        engine(folder, kv_cache_dtype="fp4")


@pytest.mark.parametrize(
    ("family", "said"), [("deepseek", "pages keep latents"), ("mamba2", "which keeps no keys or values")]
)
def test_what_has_no_such_pages_is_refused(family: str, said: str, tmp_path: Path) -> None:
    configs = CONFIGS | dict(RECURRENT_CONFIGS)
    name = next(name for name in configs if name.startswith(family))
    with pytest.raises(ValueError, match=f"{said}: leave it out"):
        engine(make_checkpoint(tmp_path, configs[name]))


CONFIG = dict(FAMILY_CONFIGS)["deepseek-v3-groups-yarn"]
OPTIONS = {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True}


@pytest.fixture(scope="module")
def latents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("latents"), CONFIG)


def test_forks_preemption_and_prefixes_find_their_rows(latents: Path) -> None:
    wanted = ids(LLM(latents, num_pages=300, **OPTIONS), 100, 8, 18)
    tight = LLM(latents, num_pages=14, max_num_batched_tokens=40, **OPTIONS)
    assert ids(tight, 100, 8, 18) == wanted
    counted = tight.engine.loop.scheduler.statistics
    assert counted.preemptions > 0
    assert counted.prefix_hits > 0


def test_a_page_holds_one_row_a_token(latents: Path) -> None:
    llm = LLM(latents, num_pages=20, **OPTIONS)
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


def test_bits_do_not_depend_on_company_chunks_or_cached_prefixes(latents: Path) -> None:
    prompt = [(7 * place) % 101 for place in range(45)]
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=1, ignore_eos=True)
    others = [[number] * (3 + 11 * number) for number in range(4)]

    def signature(llm: LLM, asked: list[list[int]]) -> list[float]:
        outputs = llm.generate([{"prompt_token_ids": one} for one in asked], params, use_tqdm=False)
        entries = outputs[asked.index(prompt)].outputs[0].logprobs
        assert entries is not None
        return [entry.logprob for each in entries for entry in each.values()]

    def made(**more: int) -> LLM:
        return LLM(latents, num_pages=100, deterministic=True, seed=0, **OPTIONS, **more)

    alone = signature(made(), [prompt])
    crowded = made(max_num_batched_tokens=17)
    assert signature(crowded, [*others, prompt]) == alone
    assert signature(crowded, [prompt, others[0]]) == alone  # with its prefix cached
