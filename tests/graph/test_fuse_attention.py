"""Decode graphs whose attention takes up norm, rotation and page write: fewer nodes, the same results and pages."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from strata.cost.nodes import node_costs, total
from strata.graph.bind import bind
from strata.graph.capture import capture
from strata.graph.fuse import fuse
from strata.graph.fuse_attention import fuse_decode_attention
from strata.graph.merge import merge
from strata.graph.walk import meta_indices, meta_pages, operation_counts
from strata.hardware.roofline import Workload
from strata.kernels.attention.attention import attention
from strata.kernels.op import OPERATIONS
from strata.kernels.state.qk_rope_kv_write import qk_rope_kv_write
from strata.models.batch import Batch
from strata.models.config import ModelConfig, config_from_dict
from strata.models.families import build
from tests.models.batches import HandPaged, random_sequences
from tests.models.checkpoints import ALIKE_CONFIGS, FAMILY_CONFIGS

from .tiny import Tiny
from .tiny import packed as tiny_batch

families = pytest.mark.parametrize(
    "config", [config for _, config in FAMILY_CONFIGS], ids=[n for n, _ in FAMILY_CONFIGS]
)


def fused(model: nn.Module) -> fx.GraphModule:
    return fuse(merge(capture(model)))


def on_meta(config: dict[str, Any]) -> tuple[fx.GraphModule, ModelConfig]:
    read = config_from_dict(config)
    with torch.device("meta"):
        return fused(build(read)), read


@pytest.mark.parametrize("config", [config for _, config in ALIKE_CONFIGS], ids=[n for n, _ in ALIKE_CONFIGS])
def test_node_counts_of_every_family(config: dict[str, Any]) -> None:
    graph, read = on_meta(config)
    expected = operation_counts(graph)
    assert expected.pop("attention") == expected.pop("qk_rope_kv_write") == read.num_layers
    assert fuse_decode_attention(graph) is graph
    assert operation_counts(graph) == {**expected, "decode_attention": read.num_layers}
    graph.graph.lint()
    nodes = [node.name for node in graph.graph.nodes]
    assert [node.name for node in fuse_decode_attention(graph).graph.nodes] == nodes


@pytest.mark.parametrize("prepare", [lambda graph: graph, lambda graph: bind(graph, "cpu")], ids=["plain", "bound"])
@families
def test_decode_steps_compute_and_write_the_same(
    config: dict[str, Any], prepare: Callable[[fx.GraphModule], fx.GraphModule]
) -> None:
    torch.manual_seed(3)
    read = config_from_dict(config)
    model = build(read).requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.normal_(0, 0.2).add_(1.0 if "norm" in name else 0.0)
    separate, joined = prepare(fused(model)), prepare(fuse_decode_attention(fused(model)))
    caches = [HandPaged(read, 3, 24) for _ in range(2)]
    sequences = random_sequences(read.vocab_size, (20, 12, 4))
    prompts = {0: sequences[0][:9], 1: sequences[1][:1], 2: sequences[2][:3]}
    for cache in caches:
        separate(cache.next_batch(prompts))
    for rows in ((0, 1, 2), (1,), (1, 0), (0, 1)):
        chunks = {row: sequences[row][caches[0].lengths[row] :][:1] for row in rows}
        expected, found = separate(caches[0].next_batch(chunks)), joined(caches[1].next_batch(chunks))
        assert expected.isfinite().all()
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    for one, other in zip(*((*cache.keys, *cache.values) for cache in caches), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6, equal_nan=True)


def test_nodes_are_named_after_what_they_were() -> None:
    named = []
    for family in ("llama-yarn", "qwen3-linear"):
        graph = fuse_decode_attention(on_meta(dict(FAMILY_CONFIGS)[family])[0])
        named += [(node.meta["module"], node.meta["layer"]) for node in graph.graph.nodes if "+att" in str(node.meta)]
    assert named == [
        ("model.layers.0.self_attn.rope+kv_write+attention", 0),
        ("model.layers.1.self_attn.rope+kv_write+attention", 1),
        ("model.layers.0.self_attn.q_norm+k_norm+rope+kv_write+attention", 0),
        ("model.layers.1.self_attn.q_norm+k_norm+rope+kv_write+attention", 1),
    ]


def test_fusion_saves_what_went_through_memory() -> None:
    graph, config = on_meta(dict(FAMILY_CONFIGS)["qwen3-linear"])
    tokens, dim = 3, config.head_dim
    workload, sizes = Workload((1,) * tokens, (7, 1, 20)), {"kv_heads": config.num_kv_heads, "head_dim": dim}
    pages = meta_pages(workload, layers=config.num_layers, dtype=torch.float32, **sizes)
    batch = Batch(meta_indices(tokens), meta_indices(tokens), meta_indices(tokens + 1), 1, pages)
    before = total(node_costs(graph, batch, workload))
    after = total(node_costs(fuse_decode_attention(graph), batch, workload))
    assert (after.flops, after.weights) == (before.flops, before.weights)
    # Queries are written and read; keys are written once for attention, which reads them and the values from the pages.
    saved = (2 * config.num_heads + 3 * config.num_kv_heads) * dim
    assert before.bytes - after.bytes == 4 * config.num_layers * tokens * saved


@pytest.mark.parametrize("joined", [False, True])
def test_only_what_reads_the_state_of_sequences_costs_by_their_length(joined: bool) -> None:
    graph, config = on_meta(dict(FAMILY_CONFIGS)["qwen3-linear"])
    graph = fuse_decode_attention(graph) if joined else graph
    found = []
    for lengths in ((7, 1), (70, 10)):
        workload, sizes = Workload((1, 1), lengths), {"kv_heads": config.num_kv_heads, "head_dim": config.head_dim}
        pages = meta_pages(workload, layers=config.num_layers, dtype=torch.float32, **sizes)
        batch = Batch(meta_indices(2), meta_indices(2), meta_indices(3), 1, pages)
        found.append(node_costs(graph, batch, workload))
    changed = {one.operation for one, other in zip(*found, strict=True) if one.cost != other.cost}
    assert changed == {
        one.operation for one in found[0] if one.operation != "add" and OPERATIONS[one.operation].reads_state
    }
    assert len(changed) == 1


def another_reader(index: int) -> Callable[[fx.Graph, fx.Node, fx.Node], None]:
    def insert(graph: fx.Graph, written: fx.Node, attended: fx.Node) -> None:
        result = next(user for user in written.users if user.args[1] == index)
        graph.call_function(operator.add, (result, result))

    return insert


def another_result(graph: fx.Graph, written: fx.Node, attended: fx.Node) -> None:
    graph.call_function(operator.getitem, (written, 1))


def pages_read_between(graph: fx.Graph, written: fx.Node, attended: fx.Node) -> None:
    graph.call_function(getattr, (written.args[5], "keys"))


def state_read_between(graph: fx.Graph, written: fx.Node, attended: fx.Node) -> None:
    graph.call_function(attention, (written.args[0], *attended.args[1:]))


def other_layer(graph: fx.Graph, written: fx.Node, attended: fx.Node) -> None:
    *given, spec = attended.args
    attended.args = (*given, spec._replace(layer=spec.layer + 1))


def other_keys(graph: fx.Graph, written: fx.Node, attended: fx.Node) -> None:
    q, k, v, *rest = attended.args
    attended.args = (q, v, k, *rest)


@pytest.mark.parametrize(
    "change",
    [
        *(another_reader(index) for index in range(3)),
        another_result,
        pages_read_between,
        state_read_between,
        other_layer,
        other_keys,
    ],
)
def test_what_others_read_stays(change: Callable[[fx.Graph, fx.Node, fx.Node], None]) -> None:
    graph, config = on_meta(dict(FAMILY_CONFIGS)["llama-yarn"])
    written = graph.graph.find_nodes(op="call_function", target=qk_rope_kv_write)[0]
    attended = graph.graph.find_nodes(op="call_function", target=attention)[0]
    with graph.graph.inserting_before(attended):
        change(graph.graph, written, attended)
    for node in graph.graph.nodes:
        node.meta.setdefault("module", "")
        node.meta.setdefault("layer", None)
    counts = operation_counts(fuse_decode_attention(graph))
    assert (counts["decode_attention"], counts["qk_rope_kv_write"]) == (config.num_layers - 1, 1)


def test_a_model_without_rotation_stays() -> None:
    model = Tiny()
    graph = fuse_decode_attention(fused(model))
    counts = operation_counts(graph)
    assert (counts["kv_write"], counts["attention"], counts["decode_attention"]) == (2, 2, 0)
    batch = tiny_batch(4, 3)
    torch.testing.assert_close(graph(batch), Tiny.forward(model, batch))
