"""Merging changes neither results nor who owns the weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from strata.graph.merge import merge
from strata.graph.trace import trace
from strata.kernels.activation.silu_mul import silu_mul
from strata.kernels.linear.linear import linear

from .tiny import HEAD_DIM, HEADS, HIDDEN, INNER, KV_HEADS, LAYERS, Linear, Tiny, packed


def linears(graph) -> list[str]:
    return [node.meta["module"] for node in graph.graph.nodes if node.target is linear]


@pytest.mark.parametrize("biased", ["", "qkv"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5), (torch.bfloat16, 0.06)]
)
def test_merged_graph_computes_the_same(biased: str, dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    model = Tiny(biased).to(dtype)
    batch = packed(5, 3)
    before, values = model(batch), [parameter.clone() for parameter in model.parameters()]
    graph = merge(trace(model))
    torch.testing.assert_close(graph(batch), before, rtol=tolerance, atol=tolerance)
    # The module runs on the views, of the same values at other addresses, on which the bits of a product may depend.
    assert all(map(torch.equal, model.parameters(), values))
    torch.testing.assert_close(model(batch), before, rtol=tolerance, atol=tolerance)


def test_node_counts_and_names() -> None:
    graph = trace(Tiny())
    assert len(linears(graph)) == 7 * LAYERS
    merged = linears(merge(graph))
    assert len(merged) == 4 * LAYERS
    assert merged[:4] == [
        "layers.0.q_proj&k_proj&v_proj",
        "layers.0.o_proj",
        "layers.0.gate_proj&up_proj",
        "layers.0.down_proj",
    ]


def test_update_through_the_checkpoint_name_reaches_the_merged_weight() -> None:
    torch.manual_seed(0)
    model = Tiny("qkv")
    graph = merge(trace(model))
    other = Tiny("qkv")
    for parameter, value in zip(model.parameters(), other.parameters(), strict=True):
        parameter.copy_(value)
    batch = packed(4)
    torch.testing.assert_close(graph(batch), other(batch), rtol=2e-5, atol=2e-5)


def test_parameters_are_views_of_one_storage() -> None:
    model = Tiny()
    names = {name: parameter.shape for name, parameter in model.named_parameters()}
    graph = merge(trace(model))
    layer = model.layers[0]
    assert layer.k_proj.weight.data_ptr() == layer.q_proj.weight.data_ptr() + 4 * HIDDEN * HEADS * HEAD_DIM
    whole = graph.get_buffer("layers.0.q_proj_k_proj_v_proj_weight")
    assert whole.shape == ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN)
    assert whole.data_ptr() == layer.q_proj.weight.data_ptr()
    assert {name: parameter.shape for name, parameter in model.named_parameters()} == names
    assert set(model.state_dict()) == set(names)


def test_what_lies_apart_in_one_storage_stays_there() -> None:
    """As in training, whose updates go to that memory: other matrices lie between queries, keys and values."""
    torch.manual_seed(0)
    model = Tiny()
    batch = packed(5, 3)
    before = model(batch)
    parameters = [one for _, one in sorted(model.named_parameters(), key=lambda named: "k_proj" in named[0])]
    flat = torch.cat([one.data.flatten() for one in parameters])
    for one, place in zip(parameters, flat.split([one.numel() for one in parameters]), strict=True):
        one.data = place.view(one.shape)
    graph = merge(trace(model))
    assert {one.untyped_storage().data_ptr() for one in parameters} == {flat.data_ptr()}
    apart = [f"layers.0.{name}_proj" for name in ("q", "k", "v", "o")]
    assert linears(graph)[:5] == [*apart, "layers.0.gate_proj&up_proj"]
    torch.testing.assert_close(graph(batch), before, rtol=2e-5, atol=2e-5)


def test_idempotent_on_the_graph_and_on_the_model() -> None:
    model = Tiny()
    first = merge(trace(model))
    code = first.code
    assert merge(first).code == code
    second = merge(trace(model))  # finds the weights already joined: both graphs must keep following the names
    model.layers[0].up_proj.weight.zero_()
    for graph in (first, second):
        assert graph.get_buffer("layers.0.gate_proj_up_proj_weight")[INNER:].abs().max() == 0


def test_mixed_biases_stay_apart() -> None:
    merged = linears(merge(trace(Tiny("q"))))
    assert "layers.0.q_proj" in merged
    assert "layers.0.k_proj&v_proj" in merged


def test_tied_weights_are_left_alone() -> None:
    model = Tiny()
    model.layers[0].up_proj = model.layers[0].gate_proj  # one module called twice
    model.layers[1].v_proj.weight.data = model.layers[1].k_proj.weight.data  # two parameters, one storage
    batch = packed(6)
    before = model(batch)
    graph = merge(trace(model))
    names = linears(graph)
    assert names.count("layers.0.gate_proj") == 2
    assert {"layers.1.q_proj", "layers.1.k_proj", "layers.1.v_proj"} <= set(names)
    torch.testing.assert_close(graph(batch), before, rtol=2e-5, atol=2e-5)
    assert model.layers[1].v_proj.weight.data_ptr() == model.layers[1].k_proj.weight.data_ptr()


def test_meta_device() -> None:
    with torch.device("meta"):
        model = Tiny("qkv")
    graph = merge(trace(model))
    assert len(linears(graph)) == 4 * LAYERS
    assert all(isinstance(parameter, nn.Parameter) and parameter.is_meta for parameter in model.parameters())
    assert graph.get_buffer("layers.1.q_proj_k_proj_v_proj_bias").shape == ((HEADS + 2 * KV_HEADS) * HEAD_DIM,)


def test_groups_whose_names_join_alike_stay_apart() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in ("a_b", "c", "a", "b_c"):
                setattr(self, name, Linear(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = silu_mul(self.a_b(x), self.c(x))
            return silu_mul(self.a(y), self.b_c(y))

    model, x = Named(), torch.randn(3, 4)
    expected = model(x)
    first, second = merge(trace(model)), merge(trace(model))
    assert len(linears(first)) == 2
    torch.testing.assert_close(first(x), expected)
    torch.testing.assert_close(second(x), expected)
