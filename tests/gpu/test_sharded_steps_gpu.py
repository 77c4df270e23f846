"""Shards of a served model on one GPU, side by side, also of tokens: logits of one rank, bits where they are fixed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from strata.comm.operations import Along
from strata.engine.program.program import StepProgram
from strata.models.config import ModelConfig, config_from_dict
from strata.models.families import build
from strata.models.layers import CausalLM
from tests.dummies import randomize
from tests.engine.program.programs import decode, graph_of, replayed, step_program
from tests.graph.lockstep import run_in_lockstep
from tests.graph.test_shard_tokens import DRAWN, ROWS, batch_of, int32
from tests.graph.test_shard_tokens import STEPS as DIVIDED_STEPS
from tests.models.batches import HandPaged, packed, random_sequences
from tests.parallel.shards import joined, shard_of

SIZES = {
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 1024,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "attention_bias": True, "mlp_bias": True},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True},
    "qwen3-moe": {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "moe_intermediate_size": 256},
}
STEPS = ({0: 100, 1: 20}, {1: 150, 2: 33, 0: 1}, {0: 1, 1: 1, 2: 1}, {1: 1})


def model_of(name: str, dtype: torch.dtype) -> tuple[CausalLM, ModelConfig]:
    config = config_from_dict(SIZES | FAMILIES[name])
    model = build(config).to(dtype)
    randomize(model, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0 if parameter.dim() > 1 else 1.0)
    return model.requires_grad_(False), config


def logits_of(made: Sequence[StepProgram], configs: Sequence[ModelConfig], dtype: torch.dtype) -> list[list[Tensor]]:
    """Each rank's logits of some steps with prompts, and of decodes by the graph that decode steps replay."""
    caches = [HandPaged(config, 3, 208, page_size=16, dtype=dtype) for config in configs]
    for cache in caches:
        cache.keys = tuple(pool.cuda() for pool in cache.keys)
        cache.values = tuple(pool.cuda() for pool in cache.values)
    given = [iter(ids) for ids in random_sequences(SIZES["vocab_size"], (200, 200, 200))]
    results: list[list[Tensor]] = [[] for _ in made]
    for step in STEPS:
        chunks = {row: [next(given[row]) for _ in range(count)] for row, count in step.items()}
        batches = [
            pytree.tree_map_only(Tensor, lambda tensor: tensor.cuda(), cache.next_batch(chunks)) for cache in caches
        ]
        is_decode = set(step.values()) == {1}
        rows = (torch.tensor(list(step.values())).cumsum(0) - 1).int().cuda()
        graphs: list[fx.GraphModule] = [decode(one, len(step)) if is_decode else one.logits for one in made]
        taken = "rows" in {node.name for node in graphs[0].graph.nodes if node.op == "placeholder"}
        arguments = [(batch, rows) if taken else (batch,) for batch in batches]
        for own, result in zip(results, run_in_lockstep(graphs, arguments), strict=True):
            own.append(result)
    return results


def steps_of(model: CausalLM, config: ModelConfig, size: int, deterministic: bool) -> list[Tensor]:
    """The whole logits of each step, by so many ranks."""
    dtype = next(model.parameters()).dtype
    shards, models = zip(*(shard_of(model, config, size, index) for index in range(size)), strict=True)
    made = [
        step_program(own.cuda(), "cuda", deterministic, shard=part) for part, own in zip(shards, models, strict=True)
    ]
    found = logits_of(made, [part.config for part in shards], dtype)
    return joined(found, config.vocab_size)


# In bfloat16 a token near the border between two experts may go to another one.
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in FAMILIES), ("llama", torch.bfloat16), ("qwen3", torch.bfloat16)],
)
def test_ranks_have_the_logits_of_one(name: str, dtype: torch.dtype) -> None:
    model, config = model_of(name, dtype)
    wanted = steps_of(model, config, 1, deterministic=False)
    bound = 3e-2 if dtype == torch.bfloat16 else 1e-4
    for size in (2, 4, 8):
        for found, expected in zip(steps_of(model, config, size, deterministic=False), wanted, strict=True):
            error = (found.float() - expected.float()).norm() / expected.float().norm()
            assert float(error) < bound, (size, float(error))


@pytest.mark.parametrize("name", FAMILIES)
def test_sums_in_8_bits_leave_about_the_logits_of_one(name: str) -> None:
    """Of a packed step in bfloat16: relative to a step whose messages are whole."""
    model, config = model_of(name, torch.bfloat16)
    batch = pytree.tree_map_only(Tensor, Tensor.cuda, packed(random_sequences(config.vocab_size, (600, 500))))
    rows = torch.arange(0, 1100, 10, dtype=torch.int32, device="cuda")
    shards, models = zip(*(shard_of(model, config, 2, index) for index in range(2)), strict=True)
    made = [
        step_program(own.cuda(), "cuda", False, shard=part, message_dtype="fp8")
        for part, own in zip(shards, models, strict=True)
    ]
    wanted, found = (
        joined([[part] for part in run_in_lockstep(graphs, [(batch, rows)] * 2)], config.vocab_size)[0].float()
        for graphs in ([one.logits for one in made], [replayed(one, 1100) for one in made])
    )
    error = float((found - wanted).norm() / wanted.norm())
    assert 1e-3 < error < 0.15, error
    assert (found.argmax(1) == wanted.argmax(1)).float().mean() > 0.8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_deterministic_logits_do_not_depend_on_the_number_of_ranks(name: str, dtype: torch.dtype) -> None:
    model, config = model_of(name, dtype)
    wanted = steps_of(model, config, 1, deterministic=True)
    for size in (2, 4, 8):
        found = steps_of(model, config, size, deterministic=True)
        shares = [float((one != other).float().mean()) for one, other in zip(found, wanted, strict=True)]
        assert shares == [0.0] * len(STEPS), (size, shares)


pytestmark = pytest.mark.gpu


# Experts have no deterministic kernels on CUDA: such an engine is refused.
CASES = [
    (name, dtype, deterministic)
    for name, dtype in [*((name, torch.float32) for name in FAMILIES), ("qwen3", torch.bfloat16)]
    for deterministic in (False, True)
    if not (deterministic and name == "qwen3-moe")
]


@pytest.mark.parametrize(("name", "dtype", "deterministic"), CASES)
def test_ranks_that_divide_tokens_have_the_logits_of_one(name: str, dtype: torch.dtype, deterministic: bool) -> None:
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
    for shares, rows, expected, (own_rows, chosen) in zip(DIVIDED_STEPS, ROWS, wanted, DRAWN, strict=True):
        arguments = [
            on_gpu(batch_of(shares, index, rows, cache, tokens), int32(own), int32(chosen))
            for index, (cache, own) in enumerate(zip(parts, own_rows, strict=True))
        ]
        for found in run_in_lockstep([graph_of(graphs, "divided")] * 2, arguments):
            if deterministic:
                assert torch.equal(found, expected)
            error = (found.float() - expected.float()).norm() / expected.float().norm()
            assert float(error) < (3e-2 if dtype == torch.bfloat16 else 1e-4)
