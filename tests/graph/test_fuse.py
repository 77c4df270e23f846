"""Neighbours that are rotated alike are rotated together, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from strata.graph.bind import bind
from strata.graph.capture import capture
from strata.graph.cost import node_costs, total
from strata.graph.fuse import fuse
from strata.graph.merge import merge
from strata.hardware.roofline import Workload
from strata.kernels.activation import silu_mul
from strata.kernels.embedding import embedding
from strata.kernels.gemm import linear
from strata.kernels.rope import rope, rope_angles
from strata.models.batch import Batch

from .tiny import VOCABULARY, packed

HEAD_DIM = 6


class Projections(nn.Module):
    """Three projections [4, 2, 2 heads] of one input, of which `rotate` makes a result."""

    def __init__(self, rotate: Callable[..., Tensor]) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.randn(VOCABULARY, 24))
        self.projections = nn.ModuleList(nn.Module() for _ in range(3))
        for projection, heads in zip(self.projections, (4, 2, 2), strict=True):
            projection.weight = nn.Parameter(torch.randn(heads * HEAD_DIM, 24))
        self.register_buffer("table", torch.randn(20, HEAD_DIM))
        self.register_buffer("other", torch.randn(20, HEAD_DIM))
        self.rotate = rotate
        self.requires_grad_(False)

    def forward(self, batch: Batch) -> Tensor:
        x = embedding(batch.tokens, self.embed)
        parts = [linear(x, one.weight, None).unflatten(-1, (-1, HEAD_DIM)) for one in self.projections]
        cos, sin = rope_angles(batch.positions, self.table)
        others = rope_angles(batch.positions, self.other)
        return self.rotate(*parts, (cos, sin), (others[0], others[1]))


def keys_and_values(q, k, v, angles, others):
    return rope(q, *angles)[:, :2] + rope(k, *angles) + v


def ends(q, k, v, angles, others):
    return rope(q, *angles)[:, :2] + rope(v, *angles) + k


def all_three(q, k, v, angles, others):
    return rope(k, *angles) + rope(v, *angles) + rope(q, *angles)[:, :2]


def different_angles(q, k, v, angles, others):
    return rope(q, *angles)[:, :2] + rope(k, *others) + v


def read_before(q, k, v, angles, others):
    return rope(q, *angles)[:, :2] + rope(k, *angles) + silu_mul(k, v)


@pytest.mark.parametrize(
    ("rotate", "calls"),
    [(keys_and_values, 1), (all_three, 1), (ends, 2), (different_angles, 2), (read_before, 2)],
)
def test_neighbours_are_rotated_together(rotate: Callable[..., Tensor], calls: int) -> None:
    torch.manual_seed(0)
    model, batch = Projections(rotate), packed(3, 2)
    expected = model(batch)
    graph = fuse(merge(capture(model)))
    assert len(graph.graph.find_nodes(op="call_function", target=rope)) == calls
    torch.testing.assert_close(graph(batch), expected)
    torch.testing.assert_close(bind(graph, "cpu")(batch), expected)


def test_the_work_is_the_same() -> None:
    def cost(change: Callable) -> int:
        with torch.device("meta"):
            model = Projections(lambda q, k, v, angles, others: silu_mul(rope(k, *angles), rope(v, *angles)))
        batch = Batch(*(torch.empty(5, dtype=torch.int32, device="meta") for _ in range(3)), 5)
        return total(node_costs(change(merge(capture(model))), batch, Workload((5,), (5,)))).flops

    assert cost(fuse) == cost(lambda graph: graph)
