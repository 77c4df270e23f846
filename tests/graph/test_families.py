"""Every pass on the graph of every family: the operations it leaves, the same results and pages, and what it saves."""

from __future__ import annotations

import json
from collections import Counter
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from strata.cost.nodes import node_costs, total
from strata.graph.bind import bind
from strata.graph.fuse import fuse, fuse_decode_attention
from strata.graph.fuse_products import fuse_products
from strata.graph.gather import gather_after_attention
from strata.graph.merge import merge
from strata.graph.trace import trace, trace_head
from strata.graph.walk import operation_counts
from strata.hardware.roofline import Cost, Workload
from strata.kernels.op import OPERATIONS
from strata.models.config import ModelConfig
from strata.models.layers import CausalLM
from tests.models.batches import HandPaged, packed, random_sequences

from .families import CONFIGS, WAYS, families, fused, meta_model_of, meta_step, model_of, whole

# Operations of each family and way. `python -m tests.graph.test_families` writes them anew: read what has changed.
NODE_COUNTS = Path(__file__).with_name("node_counts.json")


def counts_of(name: str) -> dict[str, dict[str, int]]:
    model, _ = meta_model_of(name)
    graph, found = whole(model), {}
    for way, run in (
        ("captured", None),
        ("merged", merge),
        ("fused", fuse),
        ("decode attention", fuse_decode_attention),
    ):
        found[way] = dict(operation_counts(graph if run is None else run(graph)))
    return found | {way: dict(operation_counts(WAYS[way](model))) for way in ("products", "gated products")}


@pytest.mark.parametrize("name", CONFIGS)
def test_node_counts(name: str) -> None:
    assert counts_of(name) == json.loads(NODE_COUNTS.read_text())[name]


@pytest.mark.parametrize(("name", "merged"), [("llama-yarn", 13), ("qwen3-linear", 15)])
def test_node_counts_by_hand(name: str, merged: int) -> None:
    found, layers = counts_of(name), CONFIGS[name]["num_hidden_layers"]
    assert sum(found["merged"].values()) == merged * layers + 4
    assert found["fused"] == {
        "embedding": 1, "rope_angles": 1, "rms_norm": 1, "linear": 4 * layers + 1, "qk_rope_kv_write": layers,
        "attention": layers, "silu_mul": layers, "add_rms_norm": 2 * layers,
    }  # fmt: skip
    joined = Counter(found["fused"]) - Counter({"attention": layers, "qk_rope_kv_write": layers})
    assert found["decode attention"] == {**joined, "decode_attention": layers}
    # Five for each layer, the first norm, whose scale nothing could take up, and what stands at the beginning.
    assert found["products"] == {
        "embedding": 1, "rope_angles": 1, "rms_norm": 1, "linear": 1, "qk_rope_kv_write": layers, "attention": layers,
        "linear_add": 2 * layers, "scaled_linear_silu_mul": layers, "scaled_linear": layers,
    }  # fmt: skip
    # Hidden states keep their norm.
    hidden = operation_counts(fuse_products(fuse(merge(trace(meta_model_of(name)[0])))))
    assert (hidden["add_rms_norm"], hidden["linear"], hidden["linear_add"]) == (1, 2, 2 * layers - 1)


@pytest.mark.parametrize("run", [fuse, fuse_decode_attention, fuse_products])
@pytest.mark.parametrize("name", ["llama-yarn", "qwen3-linear", "gpt-oss-yarn", "deepseek-v3-groups-yarn"])
def test_a_pass_that_ran_finds_nothing_more(name: str, run: Any) -> None:
    graph = run(fused(meta_model_of(name)[0]))
    graph.graph.lint()
    nodes = [node.name for node in graph.graph.nodes]
    assert run(graph) is graph
    assert [node.name for node in graph.graph.nodes] == nodes


@families
def test_a_model_and_its_head_are_one_graph(config: dict[str, Any]) -> None:
    """With the same logits and parameters, and nothing fetched twice."""
    model, read = model_of(config)
    graph, head = trace(model), trace_head(model)
    counts = operation_counts(graph) + operation_counts(head)
    before = [
        node.meta for part in (graph, head) for node in part.graph.nodes if node.op not in ("placeholder", "output")
    ]
    joined = whole(model)
    joined.graph.lint()
    assert operation_counts(joined) == counts
    after = [node.meta for node in joined.graph.nodes if node.op not in ("placeholder", "output")]
    fetched = [node.target for node in joined.graph.nodes if node.op == "get_attr"]
    assert len(fetched) == len(set(fetched))
    for key in ("module", "layer", "parameters"):
        met = [meta.get(key) for meta in before]
        assert Counter(map(str, (meta.get(key) for meta in after))) - Counter(map(str, met)) == Counter()
    batch = packed(random_sequences(read.vocab_size, (5, 1, 9)))
    assert torch.equal(joined(batch), head(graph(batch)))
    shared = dict(model.named_parameters())
    assert all(parameter is shared[name] for name, parameter in joined.named_parameters())


def assert_same(found: Tensor, wanted: Tensor, exact: bool) -> None:
    assert wanted.isfinite().all()
    if exact:
        assert torch.equal(found, wanted)
    else:
        assert float((found - wanted).norm() / wanted.norm()) <= 3e-6  # 1.3e-6 was met


@cache
def plain_of(name: str) -> tuple[CausalLM, ModelConfig, list[fx.GraphModule]]:
    """A model, and its graph as the other passes begin: the one of deterministic mode is the second."""
    torch.manual_seed(1)
    model, config = model_of(CONFIGS[name])
    return model, config, [bind(WAYS["merged"](model), "cpu", deterministic) for deterministic in (False, True)]


@pytest.mark.parametrize(
    ("way", "deterministic"), [("fused", False), ("fused", True), ("decode attention", False), ("products", False)]
)
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_pages_are_the_same(name: str, way: str, deterministic: bool) -> None:
    model, read, graphs = plain_of(name)
    plain, changed = graphs[deterministic], bind(WAYS[way](model), "cpu", deterministic)
    decodes = way == "decode attention"
    for count in () if decodes else (1, 2, 5):
        batch = packed(random_sequences(read.vocab_size, (1, 2, 9, 17, 30)[:count], seed=count))
        assert_same(changed(batch), plain(batch), deterministic)
    caches = [HandPaged(read, 3, 24) for _ in range(2)]
    ids = random_sequences(read.vocab_size, (20, 14, 7))
    prompts = ({0: 7, 1: 1, 2: 3}, {0: 9}, {1: 9, 0: 1})
    for step in (*prompts, {0: 1, 1: 1, 2: 1}, {1: 1}, {1: 1, 0: 1}, {0: 1, 1: 1}):
        chunks = {row: ids[row][caches[0].lengths[row] :][:count] for row, count in step.items()}
        of_plain, of_changed = (kept.next_batch(chunks) for kept in caches)
        run = plain if decodes and step in prompts else changed
        assert_same(run(of_changed), plain(of_plain), deterministic)
    near = {"fused": 1e-6, "decode attention": 1e-6}.get(way, 1e-5)
    for one, other in zip(*((*kept.keys, *kept.values) for kept in caches), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0 if deterministic else near, equal_nan=True)


@pytest.mark.parametrize("way", ["merged", "gated products"])
@pytest.mark.parametrize("name", CONFIGS)
def test_rows_gathered_at_the_last_attention_are_those_of_the_whole(name: str, way: str) -> None:
    model, read, (plain, _) = plain_of(name)
    some = bind(gather_after_attention(WAYS[way](model)), "cpu")
    batch = packed(random_sequences(read.vocab_size, (5, 1, 9)))
    expected = plain(batch)
    for rows in ([4, 5, 14], [0], [7, 7, 2], []):
        index = torch.tensor(rows, dtype=torch.int32)
        torch.testing.assert_close(some(batch, index), expected[index.long()], rtol=1e-6, atol=1e-5)


def test_fused_graphs_in_bf16_have_the_same_bits() -> None:
    torch.manual_seed(0)
    model, read = model_of(CONFIGS["qwen3-tied"])
    plain, changed = (bind(WAYS[way](model.bfloat16()), "cpu", True) for way in ("merged", "fused"))
    batch = packed(random_sequences(read.vocab_size, (5, 11)))
    assert torch.equal(changed(batch), plain(batch))


@families
def test_products_in_bf16_are_as_exact_as_without(config: dict[str, Any]) -> None:
    torch.manual_seed(2)
    model, read = model_of(config)
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())
    rounded = deepcopy(model).bfloat16()
    exact = bind(fused(model), "cpu")
    graphs = [bind(graph, "cpu") for graph in (fused(rounded), fuse_products(fused(rounded)))]
    errors = torch.zeros(2)
    for seed in range(6):
        batch = packed(random_sequences(read.vocab_size, (30, 40, 50), seed=seed))
        wanted = exact(batch)
        errors += torch.stack([(graph(batch).float() - wanted).square().mean() for graph in graphs])
    separate, joined = errors.sqrt().tolist()
    assert 0 < joined <= 1.1 * separate


NAMED = {
    ("fused", "llama-yarn"): [
        ("model.layers.0.self_attn.rope+kv_write", 0),
        ("model.layers.0.post_attention_layernorm+add", 0),
        ("model.layers.1.input_layernorm+add", 1),
        ("model.layers.1.self_attn.rope+kv_write", 1),
        ("model.layers.1.post_attention_layernorm+add", 1),
        ("model.norm+add", None),
    ],
    ("decode attention", "qwen3-linear"): [
        ("model.layers.0.self_attn.q_norm+k_norm+rope+kv_write+attention", 0),
        ("model.layers.0.post_attention_layernorm+add", 0),
        ("model.layers.1.input_layernorm+add", 1),
        ("model.layers.1.self_attn.q_norm+k_norm+rope+kv_write+attention", 1),
        ("model.layers.1.post_attention_layernorm+add", 1),
        ("model.norm+add", None),
    ],
    ("products", "llama-yarn"): [
        ("model.layers.0.self_attn.rope+kv_write", 0),
        ("model.layers.0.self_attn.o_proj+post_attention_layernorm+add", 0),
        ("model.layers.0.mlp.gate_proj&up_proj+silu_mul", 0),
        ("model.layers.0.mlp.down_proj+input_layernorm+add", 0),
        ("model.layers.1.self_attn.rope+kv_write", 1),
        ("model.layers.1.self_attn.o_proj+post_attention_layernorm+add", 1),
        ("model.layers.1.mlp.gate_proj&up_proj+silu_mul", 1),
        ("model.layers.1.mlp.down_proj+norm+add", 1),
    ],
}


@pytest.mark.parametrize(("way", "name"), NAMED)
def test_nodes_are_named_after_what_they_were(way: str, name: str) -> None:
    nodes = WAYS[way](meta_model_of(name)[0]).graph.nodes
    called = [node.meta for node in nodes if node.op == "call_function" and "getitem" not in node.name]
    assert [(meta["module"], meta["layer"]) for meta in called if "+" in meta["module"]] == NAMED[way, name]


def saved(name: str, workload: Workload, before: str, after: str) -> tuple[Cost, Cost, ModelConfig]:
    model, config = meta_model_of(name)
    step = meta_step(config, workload)
    costs = [total(node_costs(WAYS[way](model), step, workload)) for way in (before, after)]
    return *costs, config


@pytest.mark.parametrize("name", ["llama-yarn", "qwen3-linear"])
def test_fusion_saves_bytes_and_no_work(name: str) -> None:
    before, after, config = saved(name, Workload((3,), (3,)), "merged", "fused")
    assert (after.flops, after.weights) == (before.flops, before.weights)
    sums, rotated = config.hidden_size, (config.num_heads + config.num_kv_heads) * config.head_dim
    # Each sum is read again by its norm; rotated keys by the write; normalized heads are written and read.
    bytes_of_token = 2 * sums + config.num_kv_heads * config.head_dim + (2 * rotated if name == "qwen3-linear" else 0)
    # The angles are read once for queries and keys, not twice: half of cosines and sines is counted.
    assert before.bytes - after.bytes == 3 * 4 * config.num_layers * (bytes_of_token + config.head_dim)


def test_decode_attention_saves_what_went_through_memory() -> None:
    workload = Workload((1, 1, 1), (7, 1, 20))
    before, after, config = saved("qwen3-linear", workload, "fused", "decode attention")
    assert (after.flops, after.weights) == (before.flops, before.weights)
    # Queries are written and read; keys are written once for attention, which reads them and the values from the pages.
    heads = 2 * config.num_heads + 3 * config.num_kv_heads
    assert before.bytes - after.bytes == 4 * config.num_layers * 3 * heads * config.head_dim


@pytest.mark.parametrize("name", ["llama-yarn", "qwen2-tied"])
def test_products_save_bytes_and_read_all_weights(name: str) -> None:
    before, after, config = saved(name, Workload((1, 1), (3, 9)), "fused", "products")
    assert after.weights == before.weights
    # Of each sum, its product is not written and read again, but a sum of squares is; nor are gate and up.
    norms, gated = 2 * config.num_layers, 2 * 2 * config.intermediate_size * config.num_layers
    assert before.bytes - after.bytes == 2 * 4 * (norms * (2 * config.hidden_size - 2) + gated)


@pytest.mark.parametrize("way", ["fused", "decode attention"])
def test_only_what_reads_the_state_of_sequences_costs_by_their_length(way: str) -> None:
    model, config = meta_model_of("qwen3-linear")
    graph: fx.GraphModule = WAYS[way](model)
    workloads = [Workload((1, 1), lengths) for lengths in ((7, 1), (70, 10))]
    found = [node_costs(graph, meta_step(config, workload), workload) for workload in workloads]
    changed = {one.operation for one, other in zip(*found, strict=True) if one.cost != other.cost}
    reads = {one.operation for one in found[0] if one.operation != "add" and OPERATIONS[one.operation].reads_state}
    assert changed == reads
    assert len(changed) == 1


if __name__ == "__main__":
    lines = [f"{json.dumps(name)}: {json.dumps(counts_of(name))}" for name in CONFIGS]
    NODE_COUNTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
