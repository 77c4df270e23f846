"""Steps of a served model by its shards against those of one rank, every family: in lockstep, and over gloo."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from strata.comm.launch import World
from strata.comm.mesh import Mesh
from strata.comm.under_way import finish_all_reduce, start_all_reduce
from strata.graph.bind import bind
from strata.graph.compose import compose
from strata.graph.fuse import fuse, fuse_decode_attention, fuse_gated_products
from strata.graph.fuse_products import fuse_products
from strata.graph.gather import gather_after_attention
from strata.graph.merge import merge
from strata.graph.ranks.fuse_messages import fuse_gemm_all_reduce, fuse_messages
from strata.graph.ranks.overlap import SLOTS
from strata.graph.ranks.shard import shard
from strata.graph.trace import operation_of, trace, trace_head
from strata.graph.walk import operation_counts
from strata.models.config import ModelConfig
from strata.parallel.serving_shard import RankShard
from tests.engine.program.programs import replayed, step_program
from tests.largest import largest
from tests.models.batches import HandPaged
from tests.parallel.ranks import run_ranks
from tests.parallel.shards import (
    FAMILIES,
    MIXTURES,
    PRE_NORM,
    RANKS,
    config_for,
    divisible_config,
    error_of_part,
    follow,
    joined,
    largest_error,
    model_of,
    programs_of,
    prompts_and_decodes,
    shard_of,
    together,
)

CLOSE = 1e-5
# More ranks divide what two do into smaller parts: seen of a dense model, one with biases, and mixtures.
BY_MORE = ("llama", "qwen3-biases-tied", "gpt-oss", "deepseek-v3")
SIZES = [(name, size) for name in FAMILIES for size in RANKS if size < 8 or name in BY_MORE]
FEW_SIZES = [(name, size) for name in FAMILIES for size in (2, 4) if size == 2 or name in BY_MORE]


def kv_heads_of(size: int) -> dict[str, int]:
    """Two ranks divide four KV heads, four ranks share two, eight share four."""
    return {"num_key_value_heads": 2} if size == 4 else {}


def logits_of(
    vocabulary: int,
    graphs: Sequence[fx.GraphModule],
    configs: Sequence[ModelConfig],
    decodes: Sequence[fx.GraphModule] | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[list[Tensor]]:
    """Of each rank. decodes: other graphs, for decode steps."""
    caches = [HandPaged(config, 3, 16, dtype=dtype) for config in configs]
    run = None if decodes is None else together(decodes)
    return follow(caches, prompts_and_decodes(vocabulary), together(graphs), run)


@pytest.mark.parametrize(
    ("name", "size", "deterministic", "experts"),
    [
        *((*one, False, False) for one in SIZES),
        *((name, 2, True, False) for name in FAMILIES),
        *product(MIXTURES, (2, 4), (False, True), (True,)),
    ],
)
def test_steps_of_all_ranks_have_the_logits_of_one(name: str, size: int, deterministic: bool, experts: bool) -> None:
    """Prompts, chunks and decodes by the graphs that an engine on a CPU runs. experts: ranks have different ones."""
    config = config_for(name) if experts else divisible_config(name, **kv_heads_of(size))
    model, vocabulary = model_of(config), config.vocab_size
    (wanted,) = logits_of(vocabulary, [step_program(model, "cpu", deterministic).logits], [config])
    parts, programs = programs_of(model, config, size, deterministic, expert_parallel=experts)
    if experts and config.experts is not None:
        counts = operation_counts(programs[0].logits)
        assert (counts["experts"], counts["local_experts"]) == (0, sum(config.experts.layers))
    found = logits_of(vocabulary, [one.logits for one in programs], [part.config for part in parts])
    assert largest_error(joined(found, vocabulary), wanted) < CLOSE


@pytest.mark.parametrize(("name", "size"), FEW_SIZES)
def test_steps_whose_messages_travel_beside_products_have_the_logits_of_one(name: str, size: int) -> None:
    config = divisible_config(name, **kv_heads_of(size))
    model, vocabulary = model_of(config), config.vocab_size
    (wanted,) = logits_of(vocabulary, [replayed(step_program(model, "cpu"), 100)], [config])
    parts, programs = programs_of(model, config, size, overlap=2)
    graphs = []
    for every in programs:
        assert replayed(every, 1) is every.logits
        graphs.append(replayed(every, 2))
        # All but the two behind the last attention, of each half.
        sums = 4 if name.startswith("olmo") else 2  # of a layer: queries' and keys' squares, too
        assert operation_counts(graphs[-1])["start_all_reduce"] == 2 * (sums * config.num_layers - 1)
    found = logits_of(vocabulary, graphs, [part.config for part in parts])
    assert largest_error(joined(found, vocabulary), wanted) < CLOSE


@pytest.mark.parametrize("layers", [2, 3, 6])
def test_messages_travel_to_slots_that_were_read(layers: int) -> None:
    """One step after another: since the last message of a slot was finished, another has been begun and finished."""
    config = divisible_config("llama", num_hidden_layers=layers)
    _, programs = programs_of(model_of(config), config, 2, overlap=1)
    nodes = list(replayed(programs[0], 1).graph.nodes)
    begun: dict[tuple[int, fx.Node], int] = {}
    finished: dict[tuple[int, fx.Node], int] = {}
    last: dict[int, tuple[int, fx.Node]] = {}
    for time, (step, node) in enumerate((step, node) for step in range(3) for node in nodes):
        operation = operation_of(node)
        if operation is start_all_reduce:
            slot = node.args[2]
            assert isinstance(slot, int)
            assert 0 <= slot < SLOTS
            if slot in last:
                assert any(begun[one] > finished[last[slot]] for one in finished)
            last[slot] = step, node
            begun[step, node] = time
        elif operation is finish_all_reduce:
            finished[step, node.all_input_nodes[0]] = time
    assert len(begun) == len(finished) == 3 * 2 * (2 * layers - 1)


@pytest.mark.parametrize(
    ("name", "dtype"), [("llama-biases-tied", torch.bfloat16), ("qwen3-biases-tied", torch.float32)]
)
def test_deterministic_logits_do_not_depend_on_the_number_of_ranks(name: str, dtype: torch.dtype) -> None:
    """Bit for bit, for a rank of one too: widths are summed in eight slices, pairwise, wherever the slices are."""
    widths = {"hidden_size": 128, "intermediate_size": 512, "head_dim": 64, "vocab_size": 512}
    config = divisible_config(name, **widths)
    model, found = model_of(config, dtype), {}
    for size in (1, *RANKS):
        parts, programs = programs_of(model, config, size, True)
        graphs, configs = [one.logits for one in programs], [part.config for part in parts]
        found[size] = joined(logits_of(config.vocab_size, graphs, configs, dtype=dtype), config.vocab_size)
    for size in RANKS:
        assert all(map(torch.equal, found[size], found[1])), size


def decode_graph(model: nn.Module, part: RankShard | None) -> fx.GraphModule:
    """What an engine runs for decode steps of many sequences on CUDA; those of few have fused products."""
    return fuse_decode_attention(fuse_messages(fuse(merge(whole_graph(model, part)))))


def whole_graph(model: nn.Module, part: RankShard | None) -> fx.GraphModule:
    graphs = [trace(model), trace_head(model)]
    if part is not None:
        along: Any = part.axes["tp"]
        graphs = [shard(graph, part.placements, along, part.index) for graph in graphs]
    return compose(*graphs)


@pytest.mark.parametrize(("name", "size"), FEW_SIZES)
def test_the_graphs_of_a_gpu_have_the_logits_of_one_rank_too(name: str, size: int) -> None:
    """With the decode graphs of many sequences and of few."""
    config = divisible_config(name, **kv_heads_of(size))
    model = model_of(config)

    def made(own: nn.Module, part: RankShard | None) -> list[fx.GraphModule]:
        prompts = gather_after_attention(fuse_gated_products(fuse_messages(fuse(merge(whole_graph(own, part))))))
        few = fuse_gemm_all_reduce(fuse_products(decode_graph(own, part)))
        axes = {} if part is None else part.axes
        return [bind(graph, "cpu", axes=axes) for graph in (prompts, decode_graph(own, part), few)]

    prompts, *decodes = made(model, None)
    parts = [shard_of(model, config, size, index) for index in range(size)]
    prompts_of_ranks, *decodes_of_ranks = zip(*(made(own, part) for part, own in parts), strict=True)
    for one, several in zip(decodes, decodes_of_ranks, strict=True):
        (wanted,) = logits_of(config.vocab_size, [prompts], [config], [one])
        found = logits_of(config.vocab_size, prompts_of_ranks, [part.config for part, _ in parts], several)
        assert largest_error(joined(found, config.vocab_size), wanted) < CLOSE


@pytest.mark.parametrize("name", PRE_NORM)
def test_passes_fuse_a_ranks_graph_as_they_fuse_the_whole(name: str) -> None:
    """Norms take up the additions before them, attention what leads to it, and nothing is computed twice."""
    config = divisible_config(name)
    model = model_of(config)
    whole = operation_counts(decode_graph(model, None))
    part, own = shard_of(model, config, 2, 1)
    graph = decode_graph(own, part)
    found = operation_counts(graph)
    fused = found.pop("all_reduce_add_rms_norm", 0)
    assert found.pop("all_reduce") + fused == 1 + 2 * config.num_layers
    # A bias stands between a sum over the ranks and its norm.
    summed = sum(f"model.layers.{layer}.{name}.bias" in part.placements for layer in range(2) for name in SUMMED)
    assert fused == 2 * config.num_layers - summed
    found["add_rms_norm"] += fused
    whole["add"] += summed
    whole["vocabulary_embedding"] = whole.pop("embedding")
    assert {**found} == {name: count for name, count in whole.items() if count}
    for node in graph.graph.nodes:
        if operation_of(node) is not None and operation_of(node).collective:  # type: ignore[union-attr]
            assert node.meta["layer"] is not None or node.meta["module"].startswith(
                ("model.embed_tokens", "model.norm")
            )


SUMMED = ("self_attn.o_proj", "mlp.down_proj")


def over_gloo(world: World, folder: Path) -> float:
    """The largest relative error of this rank's logits over all families."""
    axis = Mesh.of(world, {"tp": world.size}).axis("tp")
    errors: list[float] = []
    cases = [(divisible_config(name, **kv_heads_of(world.size)), False) for name in FAMILIES]
    for config, experts in (*cases, *((config_for(name), True) for name in MIXTURES)):
        model = model_of(config)
        (wanted,) = logits_of(config.vocab_size, [step_program(model, "cpu").logits], [config])
        part, own = shard_of(model, config, world.size, world.rank, axis, expert_parallel=experts)
        for deterministic in (False, True):
            mine = step_program(own, "cpu", deterministic, shard=part).logits
            (found,) = logits_of(config.vocab_size, [mine], [part.config])
            errors.append(error_of_part(part, found, wanted))
    return largest(errors)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_over_gloo_have_the_logits_of_one(size: int, tmp_path: Path) -> None:
    assert largest(run_ranks(over_gloo, size, tmp_path)) < CLOSE
