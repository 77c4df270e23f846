"""The pass that lets products be summed in slices: where it acts, and what stands behind them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from strata.comm.operations import Along
from strata.comm.placement import Placement
from strata.graph.capture import capture, operation_of
from strata.graph.ranks.shard import shard
from strata.graph.ranks.slice_products import slice_products
from strata.kernels.linear.linear import linear

from .lockstep import run_in_lockstep

ROW = {"weight": Placement.ROW, "bias": Placement.PER_TOKEN, "other": Placement.COLUMN}


class Two(nn.Module):
    """A product whose width ranks divide, and one whose rows they divide."""

    def __init__(self, width: int = 48, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def drawn(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator).to(dtype), requires_grad=False)

        self.weight, self.bias, self.other = drawn(64, width), drawn(64), drawn(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return linear(linear(x, self.weight, self.bias), self.other, None)


def calls(graph: fx.GraphModule) -> list[Any]:
    found: list[Any] = []
    for node in graph.graph.nodes:
        operation = operation_of(node)
        if node.op.startswith("call"):
            found.append(operation.name if operation is not None else getattr(node.target, "__name__", node.target))
    return found


@pytest.mark.parametrize(
    ("dtype", "ranks", "expected"),
    [
        (torch.float32, 1, ["sliced_linear", "add", "linear"]),
        (torch.bfloat16, 1, ["sliced_linear", "add", "linear"]),
        (torch.float32, 2, ["sliced_linear", "all_reduce", "add", "linear"]),
        (torch.bfloat16, 2, ["sliced_linear", "all_reduce", "to", "add", "linear"]),
        (torch.bfloat16, 4, ["sliced_linear", "pairwise_all_reduce", "to", "add", "linear"]),
    ],
)
def test_products_that_ranks_sum_are_sliced(dtype: torch.dtype, ranks: int, expected: list[str]) -> None:
    graph = shard(capture(Two(48 // ranks, dtype)), ROW, Along("tp", ranks), 0)
    slice_products(graph, ROW, ranks)
    assert calls(graph) == expected
    (sliced,) = [node for node in graph.graph.nodes if node.name == "linear"]
    assert sliced.args[2:] == (8 // ranks, ranks > 1)


@pytest.mark.parametrize(
    ("width", "ranks", "slices"), [(24, 1, 8), (20, 1, 4), (7, 1, 1), (12, 2, 4), (10, 2, 2), (8, 3, 2), (1, 8, 1)]
)
def test_slices_of_a_width(width: int, ranks: int, slices: int) -> None:
    """Of the width that a rank holds; 3 ranks of width 8 have one of 24, and 2 slices each."""
    graph = slice_products(shard(capture(Two(width)), ROW, Along("tp", ranks), 0), ROW, ranks)
    (sliced,) = [node for node in graph.graph.nodes if node.name == "linear"]
    assert sliced.args[2] == slices


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bias_is_added_after_the_sum(dtype: torch.dtype) -> None:
    whole, x = Two(48, dtype), torch.randn(5, 48).to(dtype)
    graphs = []
    for rank in range(2):
        part = Two(24, dtype)
        part.weight.data = whole.weight.data.chunk(2, 1)[rank].contiguous()
        part.bias, part.other = whole.bias, whole.other
        graphs.append(slice_products(shard(capture(part), ROW, Along("tp", 2), rank), ROW, 2))
    (first, second) = run_in_lockstep(graphs, [(x[:, :24],), (x[:, 24:],)])
    alone = slice_products(capture(whole), ROW, 1)(x)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, alone, rtol=1e-5, atol=1e-4 if dtype == torch.float32 else 0.5)
