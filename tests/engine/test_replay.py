"""A recorded run, given again to a runner that knows its messages alone."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec

from strata import LLM, SamplingParams
from strata.cache.pool import KVPool
from strata.engine.plan import StepPlan
from strata.engine.runner import Launched, Runner

ENCODER, DECODER = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(StepPlan)


def asked(count: int) -> tuple[list[dict[str, list[int]]], list[SamplingParams]]:
    source = random.Random(5)
    common = source.choices(range(1, 300), k=40)
    prompts, params = [], []
    for number in range(count):
        own = source.choices(range(1, 300), k=source.randint(1, 6))
        prompts.append({"prompt_token_ids": common[: source.choice([0, 8, 12])] + own})
        more: dict[str, Any] = {
            3: {"repetition_penalty": 1.3, "frequency_penalty": 0.5},
            5: {"logprobs": 2, "prompt_logprobs": 1},
            7: {"logit_bias": {7: 3.0}, "min_tokens": 3, "stop_token_ids": [9, 11]},
            9: {"bad_words": ["fox jumps", "dog"]},
        }.get(number % 20, {})
        params.append(
            SamplingParams(
                n=source.choice([1, 1, 1, 3]),
                temperature=source.choice([0.0, 0.9]),
                top_p=source.choice([1.0, 0.8]),
                seed=number if number % 2 else None,
                max_tokens=16 if number < 40 else 3,
                **more,
            )
        )
    return prompts, params


def test_the_plans_of_a_run_alone_give_its_ids_again(folder: Path) -> None:
    options: dict[str, Any] = {"max_num_seqs": 32, "max_num_batched_tokens": 128, "page_size": 4, "num_pages": 70}
    llm = LLM(folder, device="cpu", verbose=False, deterministic=True, **options)
    loop = llm.engine.loop
    loop._run_ahead = True
    runner: Any = loop._runner
    launch, frames = runner.launch, []

    def recording(plan: StepPlan) -> Any:
        frames.append(ENCODER.encode(plan))
        assert DECODER.decode(frames[-1]) == plan
        return launch(plan)

    runner.launch = recording
    prompts, params = asked(200)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    counted = loop.scheduler.statistics
    assert counted.preemptions > 0
    assert counted.prefix_hits > 0

    pool = KVPool(runner.pool.shape, runner.pool.pages, llm.engine.device)
    fresh = Runner(runner.program, pool, runner._config, llm.engine.device)
    drawn: dict[int, list[int]] = {}
    for frame in frames:
        step = fresh.launch(DECODER.decode(frame))
        assert isinstance(step, Launched)
        for draw, id in zip(step.plan.draws, step.wait(), strict=True):
            drawn.setdefault(draw.sequence, []).append(id)
    samples = [sample.token_ids for output in outputs for sample in output.outputs]
    assert len(drawn) == len(samples)
    # Ids that were drawn beyond an end, while the host did not know it, are nobody's.
    assert [drawn[place][: len(ids)] for place, ids in enumerate(samples)] == samples
