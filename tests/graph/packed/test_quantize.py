"""Packed weights in a graph: the same as a plain model of what they stand for."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, fx, nn

from strata.cost.nodes import node_costs
from strata.graph.bind import bind
from strata.graph.capture import capture, capture_head
from strata.graph.fuse import fuse, fuse_gated_products
from strata.graph.merge import merge
from strata.graph.quantize import quantize, weights_of_products
from strata.graph.walk import operation_counts
from strata.hardware.roofline import Workload
from strata.kernels.quant.packed import PackedWeight, dense, pack, round_activations, with_own_rows
from strata.kernels.quant.schemes import SCHEMES
from strata.models.batch import Batch
from strata.models.config import config_from_dict
from strata.models.families import build
from tests.dummies import randomize
from tests.models.batches import packed, random_sequences
from tests.models.checkpoints import FAMILY_CONFIGS

from ..tiny import HIDDEN, INNER, LAYERS, Linear, Tiny
from ..tiny import packed as packed_tiny


def pack_all(model: nn.Module, graphs: list[fx.GraphModule], scheme: str) -> dict[str, PackedWeight]:
    """As a load packs them: blocks of rows that the last one does not fill become rows."""
    packed = {name: pack(model.get_parameter(name).data, SCHEMES[scheme]) for name in weights_of_products(graphs)}
    return {name: with_own_rows(one) if one.shape[-2] % one.rows else one for name, one in packed.items()}


@torch.no_grad()
def put_dense(model: nn.Module, weights: dict[str, PackedWeight]) -> None:
    for name, weight in weights.items():
        model.get_parameter(name).copy_(dense(weight))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("biased", ["", "qkv"])
@torch.no_grad()
def test_merged_and_fused_graph_equals_a_twin(scheme: str, biased: str) -> None:
    """The twin is plain, holds what the packed weights stand for, and rounds what its products read."""
    torch.manual_seed(0)
    model = Tiny(biased).double()
    graph = capture(model)
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
    graph, head = capture(model), capture_head(model)
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
    before = merge(capture(model))(packed_tiny(4))
    weights = pack_all(model, [capture(model)], "int8_weights")
    held = sum(weight.nbytes for weight in weights.values())
    for name in weights:
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, nn.Parameter(model.get_parameter(name).to("meta")))
    graphs = [merge(quantize(capture(model), weights)) for _ in range(2)]
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
    graph = capture(model)
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
    graph = merge(quantize(capture(model), pack_all(model, [capture(model)], "int8_weights")))
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
        quantize(capture(model), {"embed.weight": weight})
    with pytest.raises(ValueError, match=r"q_proj.weight is \[24, 24\], and was packed as \[50, 24\]"):
        quantize(capture(model), {"layers.0.q_proj.weight": weight})
