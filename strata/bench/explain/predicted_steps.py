"""What the steps of an engine should take on the device that it runs on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from strata.bench.run import Setup
from strata.bench.workloads import InferenceTest
from strata.cost.step_model import StepModel, dtype_name
from strata.engine.engine_config import device_of
from strata.hardware.figures import Device
from strata.models.config import DTYPES
from strata.parallel.serving_shard import RankShard
from strata.plan.explain.ceilings import PROCESSOR, device_here
from strata.plan.explain.measurement import EngineFacts
from strata.plan.meta_model import meta_model

if TYPE_CHECKING:
    from strata.engine.llm import LLM


def predicted(llm: LLM, setup: Setup) -> tuple[StepModel, Sequence[str]]:
    """Steps of an engine's model, and where a processor's ceilings come from. Raises ValueError for a GPU that is not
    in the database, and for ranks that share a processor, of which no link is known."""
    check_ranks(setup)
    here = device_here(PROCESSOR if llm.engine.device.type == "cpu" else None)
    return _steps(llm, setup, dtype_name(next(llm.engine.model.parameters()).dtype), here.device), here.sources


def check_ranks(setup: Setup) -> None:
    """Raises ValueError for ranks that share a processor, of which no link is known."""
    if device_of(setup.device).type == "cpu" and setup.tensor_parallel_size > 1:
        raise ValueError(
            "nothing tells what steps of several ranks on one processor should take: leave out "
            "--tensor-parallel-size, or run it on GPUs"
        )


def in_requested_dtype(facts: EngineFacts, llm: LLM, setup: Setup, times: StepModel) -> StepModel | None:
    """The same in the dtype that was asked for; None where the engine has it."""
    return None if facts.dtype == facts.asked_dtype else _steps(llm, setup, facts.asked_dtype, times.device)


def ideal_seconds(test: InferenceTest, times: StepModel) -> float:
    """The least that a test takes where its steps are predicted."""
    return test.floor(times.costs.step, times.device, times.dtype, times.link)


def _steps(llm: LLM, setup: Setup, dtype: str, device: Device) -> StepModel:
    engine, shard = llm.engine, None
    options: dict[str, Any] = {
        "deterministic": setup.deterministic,
        "quantization": setup.quantization,
        "kv_cache_dtype": setup.kv_cache_dtype,
    }
    if engine.device.type != "cpu":
        options["max_num_seqs"] = engine.loop.scheduler.max_sequences
        if (ranks := setup.tensor_parallel_size) > 1:
            shard = RankShard.of(engine.config, ranks, 0, expert_parallel=setup.enable_expert_parallel)
    kernels = None if engine.device.type == "cpu" else device
    model = meta_model(engine.config, kernels, DTYPES[dtype], shard, folder=setup.checkpoint, **options)
    return StepModel(model, device)
