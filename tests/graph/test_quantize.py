"""Packed weights in a graph are a plain model of what they stand for; norms and gates round for their products."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, fx, nn

from strata.cost.nodes import node_costs, total
from strata.graph.bind import bind
from strata.graph.compose import compose
from strata.graph.fuse import fuse, fuse_gated_products
from strata.graph.fuse_rounding import fuse_rounding
from strata.graph.gather import gather_after_attention
from strata.graph.merge import merge
from strata.graph.quantize import quantize, weights_of_products
from strata.graph.trace import trace, trace_head
from strata.graph.walk import operation_counts
from strata.hardware.roofline import Workload
from strata.kernels.quant.quantized import QuantizedWeight, dense, pack, round_activations, with_scale_per_row
from strata.kernels.quant.schemes import SCHEMES
from strata.models.batch import Batch
from strata.models.config import config_from_dict
from strata.models.families import build
from tests.dummies import randomize
from tests.models.batches import packed, random_sequences
from tests.models.checkpoints import ALIKE_CONFIGS, FAMILY_CONFIGS

from .families import CONFIGS
from .tiny import HIDDEN, INNER, LAYERS, Linear, Tiny
from .tiny import packed as packed_tiny


def pack_all(model: nn.Module, graphs: list[fx.GraphModule], scheme: str) -> dict[str, QuantizedWeight]:
    """As a load packs them: blocks of rows that the last one does not fill become rows."""
    packed = {name: pack(model.get_parameter(name).data, SCHEMES[scheme]) for name in weights_of_products(graphs)}
    return {name: with_scale_per_row(one) if one.shape[-2] % one.rows else one for name, one in packed.items()}


@torch.no_grad()
def put_dense(model: nn.Module, weights: dict[str, QuantizedWeight]) -> None:
    for name, weight in weights.items():
        model.get_parameter(name).copy_(dense(weight))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("biased", ["", "qkv"])
@torch.no_grad()
def test_merged_and_fused_graph_equals_a_twin(scheme: str, biased: str) -> None:
    """The twin is plain, holds what the packed weights stand for, and rounds what its products read."""
    torch.manual_seed(0)
    model = Tiny(biased).double()
    graph = trace(model)
    weights = pack_all(model, [graph], scheme)
    quantize(graph, weights)
    fuse_gated_products(fuse(merge(graph)))
    assert operation_counts(graph)["linear"] == 3 * LAYERS  # q&k&v, o, down
    assert operation_counts(graph)["linear_silu_mul"] == LAYERS
    put_dense(model, weights)
    for layer in model.modules():
        if isinstance(layer, Linear):
            layer.register_forward_pre_hook(lambda _, x: (round_activations(x[0], SCHEMES[scheme]).double(),))
    batch = packed_tiny(5, 3)
    # Products are summed in float32 there.
    torch.testing.assert_close(graph(batch), model(batch), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "config"), FAMILY_CONFIGS, ids=[name for name, _ in FAMILY_CONFIGS])
@torch.no_grad()
def test_every_family_runs_from_packed_weights(name: str, config: dict) -> None:
    model = build(config_from_dict(config, name))
    randomize(model, 0)
    tokens = packed(random_sequences(config["vocab_size"], (9, 4)))
    graph, head = trace(model), trace_head(model)
    weights = pack_all(model, [graph, head], "int8_weights")
    inside = {name for name in weights if name.startswith("model.layers.0.")}
    assert inside
    bound = bind(fuse(merge(quantize(graph, weights))), "cpu")
    put_dense(model, weights)
    torch.testing.assert_close(bound(tokens), model(tokens), rtol=2e-4, atol=2e-4)


@torch.no_grad()
def test_parameters_may_be_without_memory_and_graphs_share_one_copy() -> None:
    torch.manual_seed(0)
    model = Tiny()
    before = merge(trace(model))(packed_tiny(4))
    weights = pack_all(model, [trace(model)], "int8_weights")
    held = sum(weight.nbytes for weight in weights.values())
    for name in weights:
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, nn.Parameter(model.get_parameter(name).to("meta")))
    graphs = [merge(quantize(trace(model), weights)) for _ in range(2)]
    one, other = (graph(packed_tiny(4)) for graph in graphs)
    assert torch.equal(one, other)
    assert (one - before).abs().max() < 0.1
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in all_packed(graphs)}
    assert sum(storages.values()) == held


def on_meta(batch: Batch) -> Batch:
    fields = {name: getattr(batch, name).to("meta") for name in ("tokens", "positions", "offsets")}
    return dataclasses.replace(batch, **fields)


def all_packed(graphs: list[fx.GraphModule]) -> list[Tensor]:
    return [
        tensor
        for graph in graphs
        for name, tensor in graph.named_buffers()
        if name.endswith(("weight_values", "weight_scales"))
    ]


def test_weights_of_different_schemes_are_not_merged() -> None:
    model = Tiny()
    graph = trace(model)
    weights = pack_all(model, [graph], "int8_weights")
    weights |= {name: pack(model.get_parameter(name), SCHEMES["int4"]) for name in weights if "v_proj" in name}
    del weights["layers.0.up_proj.weight"]
    merged = merge(quantize(graph, weights))
    modules = [node.module for node in node_costs(merged, on_meta(packed_tiny(4)), Workload((4,), (4,)))]
    assert "layers.0.q_proj&k_proj" in modules
    assert "layers.0.v_proj" in modules
    assert "layers.0.gate_proj" in modules
    assert "layers.1.gate_proj&up_proj" in modules


def test_costs_count_packed_bytes() -> None:
    model = Tiny()
    graph = merge(quantize(trace(model), pack_all(model, [trace(model)], "int8_weights")))
    nodes = node_costs(graph, on_meta(packed_tiny(4)), Workload((4,), (4,)))
    (gate_up,) = [node for node in nodes if node.module == "layers.0.gate_proj&up_proj"]
    assert gate_up.cost.weights == 2 * INNER * (HIDDEN + 4)
    assert gate_up.cost.flops == 2 * 4 * HIDDEN * 2 * INNER
    assert gate_up.weight == (2 * INNER, HIDDEN)
    assert gate_up.parameters == {f"layers.0.{name}_proj.weight": INNER * HIDDEN for name in ("gate", "up")}


def test_what_is_no_product_is_refused() -> None:
    model = Tiny()
    weight = pack(model.embed.weight, SCHEMES["int8"])
    with pytest.raises(ValueError, match=r"reads embed.weight and is no product"):
        quantize(trace(model), {"embed.weight": weight})
    with pytest.raises(ValueError, match=r"q_proj.weight is \[24, 24\], and was packed as \[50, 24\]"):
        quantize(trace(model), {"layers.0.q_proj.weight": weight})


def multiplies(weight: QuantizedWeight) -> bool:
    return bool(weight.activations) and weight.order is None


def packed_graph(
    model: nn.Module, scheme: str, plain: tuple[str, ...] = ("lm_head", "mlp.gate.weight", "mlp.router")
) -> fx.GraphModule:
    """From Batch to logits as far as the other passes go. plain: parts of names of weights that are not packed."""
    graph, head = trace(model), trace_head(model)
    names = [name for name in weights_of_products([graph]) if not any(one in name for one in plain)]
    quantize(graph, {name: pack(model.get_parameter(name).data, SCHEMES[scheme]) for name in names})
    return fuse(merge(compose(graph, head)))


def family(name: str) -> nn.Module:
    model = build(config_from_dict(CONFIGS[name], name)).requires_grad_(False)
    randomize(model, 0)
    return model


def rounding_counts(graph: fx.GraphModule) -> tuple[int, int, int]:
    counts = operation_counts(graph)
    norms = sum(counts[f"{name}_round"] for name in ("rms_norm", "wide_rms_norm", "add_rms_norm"))
    return norms, counts["silu_mul_round"], counts["quantized_linear"]


# Of families whose layers are not all alike, or otherwise than Llama's: norms, gates and products that are fused. OLMo
# has its norms behind products, Gemma and gpt-oss have other gates; latent attention has norms within.
OTHERS = {
    "olmo2-odd": (0, 2, 2),
    "olmo2-biases-tied": (0, 3, 3),
    "olmo2-yarn": (0, 2, 2),
    "olmo3-yarn": (0, 4, 4),
    "olmo3-layer-types-bases": (0, 3, 3),
    "olmo3-no-windows-tied": (0, 2, 2),
    "gemma3-local-global": (8, 0, 8),
    "gemma3-softcap-untied-biases": (6, 0, 6),
    "gemma3-bases": (4, 0, 4),
    "deepseek-v2-groups-biases-wide-values": (6, 2, 8),
    "deepseek-v3-groups-yarn": (9, 3, 12),
    "deepseek-v3-halves-biases": (4, 2, 8),
    "gpt-oss-yarn": (4, 0, 4),
    "gpt-oss-no-biases-tied": (2, 0, 2),
    "gpt-oss-no-windows": (3, 0, 3),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_node_counts_of_every_family(name: str) -> None:
    layers = CONFIGS[name]["num_hidden_layers"]
    graph = packed_graph(family(name), "int8")
    products = operation_counts(graph)["linear"]
    fuse_rounding(graph, torch.float32, multiplies)
    # Both norms of a layer, its gate, and of its products all but that behind attention.
    found = rounding_counts(graph)
    assert found == OTHERS.get(name, (2 * layers, layers, 3 * layers))
    assert operation_counts(graph)["linear"] == products - found[2]
    graph.graph.lint()


def test_llama_has_no_other_operations() -> None:
    name, config = ALIKE_CONFIGS[0]
    layers = config["num_hidden_layers"]
    graph = fuse_rounding(packed_graph(family(name), "fp8"), torch.float32, multiplies)
    assert operation_counts(graph) == {
        "embedding": 1, "rope_angles": 1, "rms_norm_round": 1, "quantized_linear": 3 * layers, "linear": layers + 1,
        "qk_rope_kv_write": layers, "attention": layers, "add_rms_norm_round": 2 * layers - 1,
        "silu_mul_round": layers, "add_rms_norm": 1,
    }  # fmt: skip
    modules = [
        node.meta["module"]
        for node in graph.graph.nodes
        if any(word in node.name for word in ("round", "quantized")) and node.op == "call_function"
    ]
    assert modules[:6] == [
        "model.layers.0.input_layernorm+round",
        "model.layers.0.self_attn.q_proj&k_proj&v_proj",
        "model.layers.0.post_attention_layernorm+add+round",
        "model.layers.0.mlp.gate_proj&up_proj",
        "model.layers.0.mlp.silu_mul+round",
        "model.layers.0.mlp.down_proj",
    ]


@pytest.mark.parametrize("scheme", ["fp8", "int8", "fp8_block"])
@pytest.mark.parametrize(
    "name", ["llama-biases-linear-tied", "deepseek-v3-groups-yarn", "glm4-moe-groups", "gemma3-bases"]
)
@torch.no_grad()
def test_fused_graphs_have_the_bits_of_the_others(name: str, scheme: str) -> None:
    """In bfloat16, whose roundings both have in the same places."""
    model = family(name).bfloat16()
    batch = packed(random_sequences(CONFIGS[name]["vocab_size"], (9, 4, 1)))
    graph = packed_graph(model, scheme)
    # The references of both: on a CPU the library's norms are others.
    wanted = bind(fuse_gated_products(packed_graph(model, scheme)), "reference")(batch)
    found = bind(fuse_gated_products(fuse_rounding(graph, torch.bfloat16, multiplies)), "reference")(batch)
    assert wanted.isfinite().all()
    assert torch.equal(found, wanted)


@torch.no_grad()
def test_what_chosen_rows_go_through_is_left_alone() -> None:
    model = family("llama-yarn")
    batch, rows = packed(random_sequences(77, (9, 4))), torch.tensor([8, 12], dtype=torch.int32)
    graph = gather_after_attention(packed_graph(model, "int8"))
    wanted = bind(gather_after_attention(packed_graph(model, "int8")), "reference")(batch, rows)
    fuse_rounding(graph, torch.float32, multiplies)
    assert rounding_counts(graph) == (3, 1, 4)
    assert operation_counts(fuse_gated_products(graph))["linear_silu_mul"] == 1
    assert torch.equal(bind(graph, "reference")(batch, rows), wanted)


@torch.no_grad()
def test_other_readers_have_the_rows_as_they_are() -> None:
    """Plain weights, those of a scheme that rounds nothing or otherwise, and columns in an order of their own."""
    torch.manual_seed(0)
    model = Tiny()
    batch = packed_tiny(5, 3)
    schemes = {"q_proj": "int8", "k_proj": "fp8", "v_proj": "int8_weights", "down_proj": "int8", "gate_proj": "int8"}

    weights = {
        name: pack(model.get_parameter(name), SCHEMES[scheme])
        for name in weights_of_products([trace(model)])
        for part, scheme in schemes.items()
        if part in name
    }
    turned = "layers.1.gate_proj.weight"
    weights[turned] = weights[turned]._replace(order=torch.randperm(HIDDEN).int())
    wanted, graph = (fuse(merge(quantize(trace(model), weights))) for _ in range(2))
    fuse_rounding(graph, torch.float32, multiplies)
    # Of the norms the first of both layers, for q, and the second of the first, for gate; of products also down.
    assert rounding_counts(graph) == (3, 2, 5)
    kept = [
        node.args[-1] for node in graph.graph.nodes if node.name.startswith(("rms_norm_round", "add_rms_norm_round"))
    ]
    assert kept == [True] * 3
    assert torch.equal(bind(graph, "reference")(batch), bind(wanted, "reference")(batch))


def test_a_gate_that_something_else_reads_stays() -> None:
    graph = fuse(merge(trace(Tiny())))
    before = operation_counts(graph)
    assert operation_counts(fuse_rounding(graph, torch.float32, multiplies)) == before
    packed_once = packed_graph(Tiny(), "int8", plain=("lm_head", "layers.0.down_proj"))
    fuse_rounding(packed_once, torch.float32, multiplies)
    counts = operation_counts(packed_once)
    assert (counts["silu_mul"], counts["silu_mul_round"]) == (1, 1)


def test_costs_are_of_what_is_read_and_written() -> None:
    tokens = 7
    batch, workload = on_meta(packed_tiny(tokens)), Workload((tokens,), (tokens,))
    plain = node_costs(packed_graph(Tiny(), "int8"), batch, workload)
    nodes = node_costs(fuse_rounding(packed_graph(Tiny(), "int8"), torch.float32, multiplies), batch, workload)
    by_name = {node.module: node.cost for node in nodes}
    # Rows of float32 come in, a byte an element and a scale go out; of a sum also the sum.
    first = by_name["layers.0.before+round"]
    assert (first.read, first.written) == (4 * HIDDEN * (tokens + 1), tokens * (HIDDEN + 4))
    added = by_name["layers.0.after+add+round"]
    assert (added.read, added.written) == (4 * HIDDEN * (2 * tokens + 1), tokens * (5 * HIDDEN + 4))
    assert added.flops == tokens * HIDDEN * (1 + 4 + 3)
    gated = by_name["layers.0.silu_mul+round"]
    assert (gated.read, gated.written, gated.flops) == (8 * tokens * INNER, tokens * (INNER + 4), 8 * tokens * INNER)
    down = by_name["layers.0.down_proj"]
    assert down.weights == HIDDEN * (INNER + 4)
    assert down.read == down.weights + tokens * (INNER + 4)
    assert (down.written, down.flops) == (4 * tokens * HIDDEN, 2 * tokens * INNER * HIDDEN)
    assert (total(nodes).flops, total(nodes).weights) == (total(plain).flops, total(plain).weights)
    # Three products of a layer and their rows: 4 bytes an element were written and read, and are one now.
    read = 3 * LAYERS * tokens
    assert total(plain).bytes - total(nodes).bytes == LAYERS * tokens * (2 * HIDDEN + INNER) * (8 - 2) - 2 * 4 * read
