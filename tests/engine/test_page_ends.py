"""What stands behind a prompt's last token in its page is nobody's: steps in which cuDNN attends write zeros there."""

from __future__ import annotations

import random

import pytest

from strata.engine.llm import LLM
from strata.engine.plan import PlanArrays, StepPlan
from strata.engine.runner import Runner
from strata.engine.sampling_params import SamplingParams


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

    def enter_and_overwrite(runner: Runner, plan: StepPlan, *, recorded: bool) -> None:
        nonlocal overwritten, copies
        enter(runner, plan, recorded=recorded)
        overwritten += overwrite_page_ends(runner, plan)
        copies += len(plan.copies)

    monkeypatch.setattr(Runner, "_enter_pages", enter_and_overwrite)
    assert outputs() == wanted
    assert overwritten > 20
    assert copies > 0
