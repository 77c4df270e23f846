"""Ranks that divide the tokens of steps, side by side on one GPU: logits against one rank's, and bits in deterministic
mode."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from strata.comm.operations import Along
from tests.engine.program.programs import graph_of, step_program
from tests.graph.lockstep import run_in_lockstep
from tests.graph.test_divide_tokens import DRAWN, ROWS, STEPS, batch_of, int32
from tests.models.batches import HandPaged, random_sequences

from .test_sharded_steps_gpu import FAMILIES, model_of

pytestmark = pytest.mark.gpu


# Experts have no deterministic kernels on CUDA: such an engine is refused.
CASES = [
    (name, dtype, deterministic)
    for name, dtype in [*((name, torch.float32) for name in FAMILIES), ("qwen3", torch.bfloat16)]
    for deterministic in (False, True)
    if not (deterministic and name == "qwen3-moe")
]


@pytest.mark.parametrize(("name", "dtype", "deterministic"), CASES)
def test_ranks_have_the_logits_of_one(name: str, dtype: torch.dtype, deterministic: bool) -> None:
    model, config = model_of(name, dtype)
    graphs = step_program(model.cuda(), "cuda", deterministic, target={"context": Along("cp", 2)})
    assert graphs.variant("divided") is not None
    caches = [HandPaged(config, 2, 16, page_size=16, dtype=dtype) for _ in range(3)]
    for cache in caches:
        cache.keys = tuple(pool.zero_().cuda() for pool in cache.keys)
        cache.values = tuple(pool.zero_().cuda() for pool in cache.values)
    whole, *parts = caches
    tokens = random_sequences(config.vocab_size, (10, 10))

    def on_gpu(*given: object) -> tuple[object, ...]:
        return pytree.tree_map_only(Tensor, lambda tensor: tensor.cuda(), given)  # type: ignore[no-any-return]

    batches = (
        whole.next_batch({0: tokens[0][:9], 1: tokens[1][:4]}),
        whole.next_batch({0: tokens[0][9:], 1: tokens[1][4:]}),
    )
    wanted = [graphs.logits(*on_gpu(batch, int32(at))) for batch, at in zip(batches, ([8, 12], [0, 6]), strict=True)]
    for shares, rows, expected, (own_rows, chosen) in zip(STEPS, ROWS, wanted, DRAWN, strict=True):
        arguments = [
            on_gpu(batch_of(shares, index, rows, cache, tokens), int32(own), int32(chosen))
            for index, (cache, own) in enumerate(zip(parts, own_rows, strict=True))
        ]
        for found in run_in_lockstep([graph_of(graphs, "divided")] * 2, arguments):
            if deterministic:
                assert torch.equal(found, expected)
            error = (found.float() - expected.float()).norm() / expected.float().norm()
            assert float(error) < (3e-2 if dtype == torch.bfloat16 else 1e-4)
