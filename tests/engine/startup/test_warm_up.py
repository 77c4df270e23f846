"""What warming up runs, and that it leaves an engine as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata import LLM, SamplingParams
from strata.cache.pages import PageAllocator
from strata.cache.prefix import PrefixTree
from strata.engine.loop import EngineLoop
from strata.engine.plan import StepPlan
from strata.engine.scheduling.config import SchedulerConfig
from strata.engine.scheduling.scheduler import Scheduler
from strata.engine.scheduling.statistics import Statistics
from strata.engine.warm_up import warm_up
from tests.engine.simulated import VOCABULARY, SimulatedRunner, Unchecked

SEED = 5
RECORDED = 2048


def plans(
    *, max_length: int = 4096, pages: int = 2000, sequences: int = 256, tokens: int = 8192, caching: bool = True
) -> list[StepPlan]:
    """Of warming up an engine, which is then as a new one."""
    allocator = PageAllocator(pages, 16)
    config = SchedulerConfig(sequences, tokens, max_length, SEED)
    scheduler = Scheduler(config, allocator, PrefixTree(allocator) if caching else None)
    told: list[StepPlan] = []

    def seconds(plan: StepPlan) -> float:
        told.append(plan)
        return 0.0

    runner = SimulatedRunner(Unchecked(), seconds)
    loop = EngineLoop(scheduler, runner, run_ahead=True, ledger=None)  # type: ignore[arg-type]
    warm_up(loop, allocator, VOCABULARY, RECORDED)
    assert scheduler.config is config
    assert loop.idle
    assert runner.observer is None
    assert scheduler.statistics == Statistics()
    assert (allocator.free, allocator.idle) == (pages, 0)
    scheduler.check()
    return told


@pytest.mark.parametrize("caching", [False, True])
def test_steps_are_as_large_as_they_are_meant_to_be(caching: bool) -> None:
    steps = [(plan.tokens, len(plan.chunks)) for plan in plans(caching=caching)]
    assert (8192, 12) in steps
    assert (7 * 700 + 101, 8) in steps
    decoding = [sequences - 1 for tokens, sequences in steps if RECORDED < tokens < RECORDED + 200]
    assert set(decoding) == {0, 1, 2, 4, 8, 16, 32, 64, 128}


@pytest.mark.parametrize(
    ("max_length", "pages", "sequences"), [(2, 2000, 8), (4, 1, 1), (8, 2000, 256), (4096, 2, 256), (300, 2000, 1)]
)
def test_it_fits_small_engines(max_length: int, pages: int, sequences: int) -> None:
    found = plans(max_length=max_length, pages=pages, sequences=sequences)
    room = min(max_length, 16 * pages)
    assert max(chunk.start + chunk.count for plan in found for chunk in plan.chunks) == room - 1
    assert max(len(plan.chunks) for plan in found) <= sequences


def test_small_steps_are_not_many() -> None:
    found = plans(tokens=64)
    assert max(plan.tokens for plan in found) == 64
    assert len(found) < 150


def test_nothing_runs_where_nothing_fits() -> None:
    assert plans(max_length=1) == []


def test_a_request_is_answered_as_without_it(folder: Path) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    prompts = [{"prompt_token_ids": list(range(5, 5 + length))} for length in (3, 40, 40)]
    found = []
    for warm in (False, True):
        llm = LLM(folder, device="cpu", dtype="float32", num_pages=20, max_num_seqs=3, max_model_len=60, seed=SEED)
        if warm:
            warm_up(llm.engine.loop, llm.engine.pages, llm.engine.config.vocab_size, RECORDED)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        found.append([(output.request_id, output.outputs[0].token_ids, output.num_cached_tokens) for output in outputs])
    assert found[0] == found[1]
