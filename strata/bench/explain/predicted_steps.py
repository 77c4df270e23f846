"""What the steps of an engine should take on the device that it runs on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from strata.bench.run import Setup
from strata.bench.workloads import InferenceTest
from strata.cost.step_model import StepSeconds, dtype_name
from strata.engine.engine_config import device_of
from strata.parallel.serving_shard import RankShard
from strata.plan.explain.ceilings import processor_device, steps_on_gpu, steps_on_processor
from strata.plan.explain.measurement import EngineFacts

if TYPE_CHECKING:
    from strata.engine.llm import LLM


def predicted(llm: LLM, setup: Setup) -> tuple[StepSeconds, Sequence[str]]:
    """Steps of an engine's model, and where a processor's ceilings come from. Raises ValueError for a GPU that is not
    in the database, and for ranks that share a processor, of which no link is known."""
    engine = llm.engine
    ran = dtype_name(next(engine.model.parameters()).dtype)
    if engine.device.type == "cpu":
        check_ranks(setup)
        here, sources = processor_device()
        return steps_on_processor(engine.config, ran, here, setup.deterministic, *_in_bits(setup)), sources
    return _on_gpu(llm, setup, ran), ()


def check_ranks(setup: Setup) -> None:
    """Raises ValueError for ranks that share a processor, of which no link is known."""
    if device_of(setup.device).type == "cpu" and setup.tensor_parallel_size > 1:
        raise ValueError(
            "nothing tells what steps of several ranks on one processor should take: leave out "
            "--tensor-parallel-size, or run it on GPUs"
        )


def in_requested_dtype(facts: EngineFacts, llm: LLM, setup: Setup, times: StepSeconds) -> StepSeconds | None:
    """The same in the dtype that was asked for; None where the engine has it."""
    if facts.dtype == facts.asked_dtype:
        return None
    if llm.engine.device.type == "cpu":
        asked = facts.asked_dtype, times.device, setup.deterministic
        return steps_on_processor(llm.engine.config, *asked, *_in_bits(setup))
    return _on_gpu(llm, setup, facts.asked_dtype)


def ideal_seconds(test: InferenceTest, times: StepSeconds) -> float:
    """The least that a test takes where its steps are predicted."""
    return test.floor(times.costs.step, times.device, times.dtype, times.link)


def _on_gpu(llm: LLM, setup: Setup, dtype: str) -> StepSeconds:
    engine, shard = llm.engine, None
    if (ranks := setup.tensor_parallel_size) > 1:
        shard = RankShard.of(engine.config, ranks, 0, expert_parallel=setup.enable_expert_parallel)
    product = torch.cuda.get_device_name(engine.device)
    given = engine.config, dtype, product, setup.deterministic, shard, *_in_bits(setup)
    return steps_on_gpu(*given, max_sequences=engine.loop.scheduler.max_sequences)


def _in_bits(setup: Setup) -> tuple[str | None, str, Path | None]:
    return setup.quantization, setup.kv_cache_dtype, setup.checkpoint
