"""Rows gathered at the last attention come out as they do when all tokens are computed, for every family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strata.graph.bind import bind
from strata.graph.capture import capture, operation_of
from strata.graph.fuse import fuse, fuse_gated_products
from strata.graph.gather import gather_after_attention
from strata.graph.merge import merge
from strata.kernels.attention.attention import attention
from strata.models.config import config_from_dict
from strata.models.families import build
from tests.models.batches import packed, random_sequences
from tests.models.checkpoints import FAMILY_CONFIGS

from .tiny import Tiny
from .tiny import packed as tiny_batch

families = pytest.mark.parametrize(
    "config", [config for _, config in FAMILY_CONFIGS], ids=[n for n, _ in FAMILY_CONFIGS]
)


@families
@pytest.mark.parametrize("fused", [False, True])
def test_rows_are_those_of_the_whole_graph(config: dict[str, Any], fused: bool) -> None:
    read = config_from_dict(config)
    model = build(read).requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.normal_(0, 0.2).add_(1.0 if "norm" in name else 0.0)
    whole, some = merge(capture(model)), merge(capture(model))
    if fused:
        fuse_gated_products(fuse(some))
    gather_after_attention(some)
    batch = packed(random_sequences(read.vocab_size, (5, 1, 9)))
    expected = bind(whole, "cpu")(batch)
    bind(some, "cpu")
    for rows in ([4, 5, 14], [0], [7, 7, 2], []):
        index = torch.tensor(rows, dtype=torch.int32)
        torch.testing.assert_close(some(batch, index), expected[index.long()], rtol=0, atol=1e-5)


def test_the_gather_stands_at_the_last_attention() -> None:
    graph = gather_after_attention(merge(capture(Tiny())))
    order = list(graph.graph.nodes)
    gathers = [node for node in order if node.target is torch.index_select]
    last = [node for node in order if operation_of(node) is attention][-1]
    assert len(gathers) == 2  # what attention gives, and the residual beside it
    assert gathers[0].args[0] is last or gathers[1].args[0] is last
    assert all(order.index(node) > order.index(last) for node in gathers)


def test_what_mixes_tokens_after_attention_is_refused() -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Tiny()

        def forward(self, batch: Any) -> Tensor:
            return self.inner(batch).cumsum(0)

    with pytest.raises(ValueError, match="cumsum"):
        gather_after_attention(capture(Mixing()))


def test_a_graph_without_attention_is_refused() -> None:
    with pytest.raises(ValueError, match="no attention"):
        gather_after_attention(capture(Tiny(), "head"))


def test_gated_products() -> None:
    model = Tiny()
    plain, fused = merge(capture(model)), fuse_gated_products(merge(capture(model)))
    batch = tiny_batch(5, 3)
    names = [node.target.name for node in fused.graph.nodes if operation_of(node) is not None]
    assert names.count("linear_silu_mul") == 2
    assert "silu_mul" not in names
    torch.testing.assert_close(bind(fused, "cpu")(batch), bind(plain, "cpu")(batch), rtol=0, atol=1e-6)


def test_a_product_that_others_read_is_not_gated() -> None:
    class Read(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Tiny().layers[0]

        def forward(self, x: Tensor) -> Tensor:
            from strata.kernels.activation.silu_mul import silu_mul

            gate = self.layer.gate_proj(x)
            return silu_mul(gate, self.layer.up_proj(x)) + gate

    graph = fuse_gated_products(merge(capture(Read())))
    assert all(getattr(node.target, "name", "") != "linear_silu_mul" for node in graph.graph.nodes)
