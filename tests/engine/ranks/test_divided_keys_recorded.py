"""Recorded steps of ranks that divide keys by sequence: the ids of steps launched eagerly, and of one rank."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from strata.cache.pages import PageAllocator
from strata.cache.pool import KVPool, PoolShape
from strata.cache.prefix import PrefixTree
from strata.cache.staging import Staging
from strata.comm.launch import World
from strata.comm.mesh import Mesh
from strata.engine.ledger import Ledger
from strata.engine.loop import EngineLoop
from strata.engine.program.program import StepProgram
from strata.engine.program.sizes import recorded_sizes
from strata.engine.request import Request
from strata.engine.runner import Runner
from strata.engine.sampling_params import SamplingParams
from strata.engine.scheduling.config import SchedulerConfig
from strata.engine.scheduling.scheduler import Scheduler
from strata.engine.steps.runner_config import RunnerConfig
from strata.kernels.state.kept_keys import ALL_KEYS, KeptKeys
from strata.models.config import ModelConfig
from tests.engine.program.programs import step_program
from tests.engine.program.test_recorded_steps import Replayed
from tests.parallel.models import random_model
from tests.parallel.ranks import run_ranks
from tests.parallel.shards import divisible_config, shard_of

MOST, LONGEST, LENGTH, TOKENS = 6, 40, 96, 384
CPU = torch.device("cpu")
SIZES = recorded_sizes(MOST, LONGEST, 10**6, library=False)


def answers(program: StepProgram, config: ModelConfig, kept: KeptKeys, replayed: Replayed | None) -> list[list[int]]:
    """The tokens of some sequences, by an engine's loop. replayed: records its steps on what counts as a device with
    memory of its own; None: they are launched eagerly."""
    shape = replace(PoolShape.of(config, 4, torch.float32), kept=kept)
    pages = PageAllocator(TOKENS // shape.page_tokens, shape.page_tokens)
    windows = frozenset() if kept.ranks > 1 else frozenset([None])
    runner_config = RunnerConfig(MOST, LONGEST, LENGTH, windows, config.num_heads, 61)
    runner = Runner(program, KVPool(shape, pages.num_pages, CPU), runner_config, CPU)
    if replayed is not None:
        tables = runner._tables
        tables.on_device, tables._shared = torch.zeros(tables.rows.shape, dtype=torch.int32), False
        runner._recordings = lambda: replayed  # type: ignore[method-assign,assignment,return-value]
        runner.record(SIZES)
    scheduler = Scheduler(SchedulerConfig(MOST, LONGEST, LENGTH, 0, None), pages, PrefixTree(pages))
    loop = EngineLoop(scheduler, runner, run_ahead=replayed is not None, ledger=Ledger("cpu", *(0,) * 11))
    draw, sequences = random.Random(3), []
    shared = tuple(draw.randrange(61) for _ in range(24))
    for number in range(12):
        prompt = tuple(draw.randrange(61) for _ in range(draw.choice([1, 2, 15, 17, 60])))
        params = SamplingParams(
            temperature=draw.choice([0.0, 0.9]), seed=number, max_tokens=20, ignore_eos=True, n=draw.choice([1, 1, 2])
        )
        sequences += loop.add(Request(str(number), (*shared, *prompt) if number % 3 == 0 else prompt, params))
    for _ in loop.outputs():
        pass
    return [list(sequence.tokens) for sequence in sequences]


def on_ranks(world: World, folder: Path, name: str) -> list[list[list[int]]]:
    # Inputs come to a place of their own, as on a device.
    Staging.target = lambda self, size: torch.full((size,), -77, dtype=torch.int32)  # type: ignore[method-assign]
    Staging.send = lambda self, target: target.copy_(self.host[: len(target)])  # type: ignore[method-assign]
    mesh = Mesh.of(world, {"tp": world.size})
    config = divisible_config(name, num_key_value_heads=1, max_position_embeddings=128)
    model = random_model(config, torch.float32).requires_grad_(False)
    part, own = shard_of(model, config, world.size, world.rank, mesh.axis("tp"), key_ranks=2)
    part = replace(part, axes={**part.axes, "dcp": mesh.neighbours("dcp", 2)})
    program = step_program(own, shard=part, page_size=4)
    replayed = Replayed()
    found = [answers(program, part.config, part.kept, one) for one in (None, replayed)]
    sizes = {key[0] for key in replayed.replayed}  # type: ignore[index]
    assert any(size.tokens == size.sequences for size in sizes)
    assert any(size.tokens != size.sequences for size in sizes)
    whole = step_program(model)
    return [*found, answers(whole, config, ALL_KEYS, None)]


@pytest.mark.parametrize("name", ["llama", "deepseek-v2"])
def test_recorded_steps_have_the_ids_of_one_rank(name: str, tmp_path: Path) -> None:
    for eager, recorded, alone in run_ranks(on_ranks, 2, tmp_path, name=name):
        assert min(map(len, alone)) > 20
        assert eager == alone
        assert recorded == alone
