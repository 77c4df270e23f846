"""GPUs that divide the tokens of prompts replay their shares of steps, and draw what one GPU draws."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from strata import LLM, SamplingParams
from tests.gpu.ranks import require_gpus

pytestmark = pytest.mark.gpu

OPTIONS: dict[str, Any] = {
    "model": "1B",
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 4096,
    "max_model_len": 8192,
    "enable_prefix_caching": False,
    "seed": 0,
    "verbose": False,
}
LENGTHS = (7000, 5, 3000, 1200, 90, 2500)
PROMPTS = [[(step * place + 3) % 5000 for place in range(length)] for step, length in enumerate(LENGTHS, 5)]


def answers(llm: LLM) -> list[list[dict[int, float]]]:
    """The log-probabilities of what is drawn first, and behind it while other prompts are computed."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=5)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [
        [{id: one.logprob for id, one in each.items()} for each in out.outputs[0].logprobs or ()] for out in outputs
    ]


def test_two_gpus_that_divide_prompts_answer_as_one() -> None:
    require_gpus(2)
    one = LLM(**OPTIONS)
    wanted = answers(one)
    del one
    gc.collect()
    two = LLM(prefill_context_parallel_size=2, **OPTIONS)
    captured = two.engine.captured
    assert captured is not None
    assert two.engine.program.sizes.sharded_tokens[0] == 512
    assert two.engine.program.sizes.sharded_tokens[-1] == 4096
    ran: list[Any] = []
    run = captured.run
    captured.run = lambda bucket: ran.append(bucket) or run(bucket)  # type: ignore[method-assign, func-returns-value]
    found = answers(two)
    assert any(size.ranks == 2 for size in ran)
    assert any(size.ranks == 1 for size in ran)
    assert two.engine.ranks is not None
    two.engine.ranks.check_ids()
    for mine, other in zip(found, wanted, strict=True):
        first, theirs = mine[0], other[0]
        for id in first.keys() & theirs.keys():
            assert first[id] == pytest.approx(theirs[id], abs=0.1)
