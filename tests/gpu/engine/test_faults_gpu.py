"""The engine on CUDA when something breaks: NaN in one request, no memory left; and that sampling waits for nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from strata import LLM, SamplingParams
from strata.engine.faults import EngineFault
from tests.engine.test_faults import NAN_TOKEN, PREFIX, assert_failed, break_embedding, poison, run
from tests.gpu.tensors import no_waiting

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
EACH_WAY = {
    "greedy": GREEDY,
    "sampled": SamplingParams(temperature=0.6, seed=3, max_tokens=24, ignore_eos=True),
    "filtered": SamplingParams(temperature=0.6, seed=3, top_k=20, top_p=0.9, max_tokens=24, ignore_eos=True),
    "special": SamplingParams(
        temperature=0.6, seed=3, logprobs=2, repetition_penalty=1.2, bad_words=["fox"], max_tokens=24, ignore_eos=True
    ),
}


def engine(folder: Path, **options: Any) -> LLM:
    return LLM(folder, **{"dtype": "float32", "num_pages": 200, "max_num_seqs": 16, **options})


@pytest.mark.parametrize("params", EACH_WAY.values(), ids=EACH_WAY.keys())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_request_with_nan_ends_and_the_others_get_the_same_bits(
    folder: Path, tmp_path: Path, params: SamplingParams, dtype: str
) -> None:
    broken = break_embedding(folder, tmp_path)
    options: dict[str, Any] = {"dtype": dtype, "deterministic": True, "max_num_batched_tokens": 32}
    healthy = [[*PREFIX, 1, 2, 3], [5, 6], list(range(30))]
    want = run(engine(broken, **options), healthy, params)
    outputs = run(engine(broken, **options), [healthy[0], [*PREFIX, NAN_TOKEN, 4], *healthy[1:], [NAN_TOKEN]], params)
    for lost in (outputs.pop(4), outputs.pop(1)):
        assert_failed(lost)
        assert lost.outputs[0].token_ids == []
    for output, expected in zip(outputs, want, strict=True):
        drawn = expected.outputs[0].token_ids
        if NAN_TOKEN in drawn:  # sampled by chance: then it fails, alone or not
            assert_failed(output)
        assert output.outputs[0].token_ids == drawn
        assert output.outputs[0].logprobs == expected.outputs[0].logprobs


def test_a_page_that_breaks_while_graphs_replay(folder: Path) -> None:
    llm = engine(folder)
    whole = run(llm, [[*PREFIX, 1]], GREEDY)[0].outputs[0].token_ids
    stream = llm.stream({"prompt_token_ids": [*PREFIX, 1]}, GREEDY)
    shown = [next(stream) for _ in range(4)]
    poison(llm, llm.engine.loop.scheduler._queues.running[0].pages[0])
    shown += list(stream)
    assert_failed(shown[-1])
    ids = shown[-1].outputs[0].token_ids
    assert 4 <= len(ids) < 8
    assert ids == whole[: len(ids)]
    llm.engine.loop.scheduler.check()
    run(llm, [[*PREFIX, 1]], GREEDY)  # may find the broken page once more, but no third one does
    (again,) = run(llm, [[*PREFIX, 1]], GREEDY)
    assert again.error is None
    assert again.outputs[0].token_ids == whole


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_pages_hold_beyond_a_sequence_does_not_matter(folder: Path, dtype: str, deterministic: bool) -> None:
    prompts = [[*PREFIX, 1], [5], [*PREFIX, 2, 3], list(range(200))]
    options: dict[str, Any] = {"dtype": dtype, "deterministic": deterministic}
    want = [output.outputs[0].token_ids for output in run(engine(folder, **options), prompts, GREEDY)]
    llm = engine(folder, **options)
    pool = llm.engine.loop._runner.pool
    for tensor in (*pool.keys, *pool.values):
        tensor.fill_(torch.nan)
    assert [output.outputs[0].token_ids for output in run(llm, prompts, GREEDY)] == want


def test_no_step_waits_for_the_device(folder: Path) -> None:
    llm = engine(folder, max_num_batched_tokens=64)
    params = [
        *EACH_WAY.values(),
        SamplingParams(temperature=0, logit_bias={7: 4.0}, min_tokens=9, max_tokens=16),
        SamplingParams(temperature=0, max_tokens=16, bad_words=["fox jumps"], ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=16, logprobs=4, prompt_logprobs=2, ignore_eos=True),
        SamplingParams(temperature=1.2, n=3, min_p=0.05, presence_penalty=1.0, max_tokens=16, ignore_eos=True),
    ]
    prompts = [{"prompt_token_ids": [*PREFIX[:10], index, *range(3 * index)]} for index in range(len(params))]
    llm.generate(prompts, params, use_tqdm=False)  # compiles what it needs
    with no_waiting():
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert all(output.error is None for output in outputs)


@pytest.fixture
def little_memory() -> Iterator[None]:
    """This process may take 8 MiB more than it has; what earlier tests left is gone, or it would make room later on."""
    gc.unfreeze()
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    yield torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (8 << 20)) / total)
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.fixture
def large(folder: Path) -> LLM:
    return engine(folder, num_pages=4000, max_num_seqs=200, max_num_batched_tokens=50000)


def test_out_of_memory_in_a_step(large: LLM, little_memory: None) -> None:
    prompts = [{"prompt_token_ids": [index % 300] * 250} for index in range(190)]
    with pytest.raises(EngineFault, match="running a step of 47,500 tokens from 190 sequences") as first:
        large.generate(prompts, GREEDY, use_tqdm=False)
    assert "KV pages" in str(first.value)
    assert large.engine.loop.idle
    large.engine.loop.scheduler.check()
    with pytest.raises(EngineFault) as second:
        large.generate("fox", GREEDY, use_tqdm=False)
    assert str(second.value) == str(first.value)


def test_out_of_memory_at_start(folder: Path, little_memory: None) -> None:
    with pytest.raises(EngineFault, match=r"out of memory on NVIDIA .* while .*max_num_seqs"):
        engine(folder, num_pages=40_000)


@pytest.mark.parametrize("deterministic", [False, True])
def test_memory_stays_within_the_ledger_beside_what_others_use(deterministic: bool) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    others = torch.empty(free // 4, dtype=torch.uint8, device="cuda")
    used = total - torch.cuda.mem_get_info()[0]
    share = used / total + 0.25
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    llm = LLM(
        "0.6B",
        load_format="dummy",
        max_model_len=40960,
        gpu_memory_utilization=share,
        skip_tokenizer_init=True,
        deterministic=deterministic,
    )
    assert llm.engine.ledger.budget <= 0.26 * total
    asked = [{"prompt_token_ids": [i % 1000] * 1500} for i in range(300)]
    params = [
        SamplingParams(max_tokens=8, ignore_eos=True, repetition_penalty=1.2, logprobs=5 if i % 2 else None)
        for i in range(len(asked))
    ]
    llm.generate(asked, params, use_tqdm=False)
    assert torch.cuda.max_memory_allocated() - before <= llm.engine.ledger.budget
    # What PyTorch keeps in pieces that nothing fits is in no estimate.
    assert total - torch.cuda.mem_get_info()[0] <= share * total + (1 << 30)
    del others
