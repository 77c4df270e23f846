"""Answers of the engine: every family's greedy tokens are transformers', over long positions, in pages apart, bit for
bit in any company, and by seeds."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from strata.cache.staging import Staging
from strata.engine.llm import LLM
from strata.engine.plan import PlanArrays, StepPlan
from strata.engine.runner import Runner
from strata.engine.sampling_params import SamplingParams
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


@pytest.mark.parametrize(
    "scaling",
    [
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },  # Qwen's recipe, 1,024 times smaller
        {"rope_type": "linear", "factor": 4.0},
    ],
)
def test_long_prompts_are_answered_as_by_transformers(tmp_path: Path, scaling: dict[str, Any]) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        rope_scaling=dict(scaling),
        initializer_range=0.3,
    )
    oracle = Qwen2ForCausalLM(config).eval()
    oracle.save_pretrained(tmp_path)
    llm = LLM(tmp_path, device="cpu", dtype="float32", num_pages=40, skip_tokenizer_init=True, verbose=False)
    assert llm.engine.max_model_len == 128
    prompt = [(7 * place) % 300 for place in range(110)]
    params = SamplingParams(temperature=0, max_tokens=18, ignore_eos=True)
    output = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0].outputs[0]
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": 18, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    want = oracle.generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert output.token_ids == want[0, len(prompt) :].tolist()


def test_a_length_over_the_longest_is_refused_with_its_reason(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    config = Qwen2Config(vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                         num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32,
                         rope_scaling=scaling)  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"longest sequence of 128 tokens: max_position_embeddings=32.*'yarn'"):
        LLM(tmp_path, device="cpu", max_model_len=129, skip_tokenizer_init=True)


OPTIONS: dict[str, Any] = {"device": "cpu", "deterministic": True, "max_num_seqs": 16, "max_num_batched_tokens": 40}


def made(folder: Path, **options: Any) -> LLM:
    """An engine whose tables on the device are other memory than the host's, as on CUDA."""
    llm = LLM(folder, **OPTIONS, **options)
    tables = llm.engine.loop._runner._tables
    tables.on_device, tables._shared = torch.zeros(tables.rows.shape, dtype=torch.int32), False
    return llm


def ids(llm: LLM, vocabulary: int = 300, count: int = 10, tokens: int = 25) -> list[list[int]]:
    """Of so many requests, some with samples that fork, whose prompts begin alike; asked twice."""
    shared = [(11 * place) % vocabulary for place in range(37)]
    prompts = [shared[: 5 + number * 3] + [number] * (number % 5 * 9) for number in range(count)]
    params = [
        SamplingParams(n=3 if number % 3 == 0 else 1, temperature=0.8, seed=number, max_tokens=tokens, ignore_eos=True)
        for number in range(len(prompts))
    ]
    found = []
    for _ in range(2):  # the second time with cached prefixes
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        found += [sample.token_ids for output in outputs for sample in output.outputs]
    return found


def test_forks_preemptions_and_cached_prefixes_find_their_pages(folder: Path) -> None:
    wanted = ids(LLM(folder, num_pages=300, **OPTIONS))
    assert ids(made(folder, num_pages=300)) == wanted
    tight = made(folder, num_pages=18)
    assert ids(tight) == wanted
    assert tight.engine.loop.scheduler.statistics.preemptions > 0
    tables = tight.engine.loop._runner._tables
    assert torch.equal(tables.on_device, torch.from_numpy(tables.rows))


def test_bytes_of_a_decode_step_do_not_grow_with_the_longest_sequence(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    monkeypatch.setattr(Staging, "send", lambda self, target: sent.append(4 * len(target)))
    steps = []
    for length in (64, 256):
        llm = made(folder, max_model_len=length, num_pages=300)
        prompts = [{"prompt_token_ids": [number] * 8} for number in range(4)]
        sent.clear()
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True), use_tqdm=False)
        steps.append(list(sent))
    assert steps[0] == steps[1]
    decodes = steps[0][2:]
    fields = (18 * 4 + 3) * 4  # eighteen numbers for each of four sequences, one more offset and two bounds
    changes = 4 * 3 * 4  # a page each, with its place
    assert sum(decodes) == 29 * fields + 2 * changes


def overwrite_page_ends(runner: Runner, plan: StepPlan) -> int:
    """With numbers that would change every result. Returns how many pages."""
    prompts, page_size, found = PlanArrays(plan).prompts, runner.pool.shape.page_size, 0
    for chunk in plan.chunks[len(plan.chunks) - prompts :]:
        last, used = divmod(chunk.start + chunk.count, page_size)
        if used:
            page = int(runner._tables.rows[chunk.slot, last])
            for pool in (runner.pool.all_keys, runner.pool.all_values):
                pool[:, page, used:] = 1e3
            found += 1
    return found


@pytest.mark.parametrize("page_size", [4, 16, 64])
def test_page_ends_of_prompts_may_be_overwritten(page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With prefixes that are shared, pages that are copied when written, samples, chunks, and sequences that are
    preempted and come back."""
    make = random.Random(page_size)
    beginnings = [tuple(make.choices(range(100, 200), k=length)) for length in (7, 33, 50)]
    prompts, params = [], []
    for number in range(24):
        rest = make.choices(range(100, 200), k=make.choice((0, 1, 2, 15, 16, 40)))
        prompts.append([*make.choice(beginnings), *rest])
        samples = make.choice((1, 1, 3))
        params.append(SamplingParams(max_tokens=make.randint(1, 24), n=samples, seed=number, ignore_eos=True))

    def outputs() -> list[list[tuple[int, ...]]]:
        options = {"max_num_seqs": 6, "max_num_batched_tokens": 24, "max_model_len": 128, "deterministic": True}
        llm = LLM(verbose=False, device="cpu", page_size=page_size, num_pages=384 // page_size, **options)
        return [[tuple(sample.token_ids) for sample in result.outputs] for result in llm.generate(prompts, params)]

    wanted = outputs()
    enter, overwritten, copies = Runner._enter_pages, 0, 0

    def enter_and_overwrite(runner: Runner, plan: StepPlan, *, captured: bool) -> None:
        nonlocal overwritten, copies
        enter(runner, plan, captured=captured)
        overwritten += overwrite_page_ends(runner, plan)
        copies += len(plan.copies)

    monkeypatch.setattr(Runner, "_enter_pages", enter_and_overwrite)
    assert outputs() == wanted
    assert overwritten > 20
    assert copies > 0


PARAMS = SamplingParams(temperature=0.8, seed=1, max_tokens=20, logprobs=2, ignore_eos=True)


def signature(llm: LLM, asked: list[list[int]], which: int) -> tuple[list[int], list[list[tuple[int, float]]]]:
    """Ids and the exact log-probabilities of one of the requests."""
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in asked], PARAMS, use_tqdm=False)
    sample = outputs[which].outputs[0]
    assert sample.logprobs is not None
    return sample.token_ids, [[(id, e.logprob) for id, e in sorted(entry.items())] for entry in sample.logprobs]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_do_not_depend_on_company(folder: Path, dtype: str) -> None:
    rng = random.Random(0)
    prompt = [rng.randrange(307) for _ in range(75)]
    crowd = [[rng.randrange(307) for _ in range(rng.randrange(1, 120))] for _ in range(9)]

    def llm(**options: int) -> LLM:
        return LLM(folder, device="cpu", dtype=dtype, deterministic=True, **{"num_pages": 300, **options})

    alone = signature(llm(), [prompt], 0)
    assert signature(llm(), [*crowd[:4], prompt, *crowd[4:]], 4) == alone, "in a batch"
    assert signature(llm(max_num_batched_tokens=11), [prompt], 0) == alone, "in chunks"
    assert signature(llm(max_num_batched_tokens=17), [*crowd, prompt], 9) == alone, "in chunks of a batch"
    cached = llm()
    signature(cached, [[*prompt[:50], 1, 2, 3], *crowd[:2]], 0)
    assert signature(cached, [prompt, *crowd[2:5]], 0) == alone, "with its prefix cached"
    assert signature(llm(page_size=32), [prompt], 0) == alone, "in larger pages"


PROMPT = {"prompt_token_ids": [5, 6, 7]}
FREE = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, seed=4)


def drawn(folder: Path, params: SamplingParams, seed: int | None) -> list[list[int]]:
    """What a new engine draws, twice in a row."""
    llm = LLM(folder, device="cpu", dtype="float32", num_pages=20, seed=seed)
    return [output.outputs[0].token_ids for output in llm.generate([PROMPT] * 2, params, use_tqdm=False)]


def test_a_new_engine_draws_anew_unless_it_is_given_a_seed(folder: Path) -> None:
    assert drawn(folder, FREE, None) != drawn(folder, FREE, None)
    seeded = drawn(folder, FREE, 3)
    assert seeded == drawn(folder, FREE, 3)
    assert seeded != drawn(folder, FREE, 2**63 - 1)
    assert seeded[0] != seeded[1], "requests of one engine draw for themselves"


def test_a_request_with_a_seed_draws_the_same_in_every_engine(folder: Path) -> None:
    first, again = drawn(folder, SEEDED, None)
    assert [first, again] == drawn(folder, SEEDED, None) == [first, first]


@pytest.mark.parametrize("seed", [0.5, "3", True, 2**63])
def test_a_seed_that_is_none_is_refused(folder: Path, seed: object) -> None:
    with pytest.raises(ValueError, match="seed must be an integer"):
        LLM(folder, device="cpu", seed=seed)


def test_dummy_weights_are_the_same_in_every_engine(folder: Path) -> None:
    made = [LLM(folder, device="cpu", dtype="float32", num_pages=20, load_format="dummy") for _ in range(2)]
    first, second = (dict(llm.engine.model.named_parameters()) for llm in made)
    assert all(bool((first[name] == second[name]).all()) for name in first)
