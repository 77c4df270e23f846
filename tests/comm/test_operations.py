"""Collectives as operations: sums over gloo ranks by hand, costs by hand, and graphs of them captured and bound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strata.comm import symmetric
from strata.comm.launch import World
from strata.comm.mesh import Axis, Mesh
from strata.comm.operations import Along, all_gather, all_reduce, all_to_all, reduce_scatter
from strata.cost.nodes import node_costs
from strata.graph.bind import bind
from strata.graph.capture import capture, operation_of
from strata.hardware.roofline import Cost, Workload
from strata.kernels.linear.linear import linear
from tests.parallel.ranks import run_ranks

ALONE = Axis("tp", 1, 0, (0,), None)
WORKLOAD = Workload((3,), (3,))


def part(rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """What one rank holds: [2, 3], of magnitudes so far apart that the order of a sum shows in its last bits."""
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(rank)).mul(10.0**rank).to(dtype)


def added(parts: list[Tensor]) -> Tensor:
    """The sum in the order of the ranks, in float32, a number at a time, rounded once."""
    total = torch.zeros(parts[0].shape)
    for one in parts:
        for index in range(one.numel()):
            total.view(-1)[index] += one.reshape(-1)[index].float()
    return total.to(parts[0].dtype)


def rows_of(rank: int, dtype: torch.dtype) -> Tensor:
    """What one rank holds that is divided: [8, 3], twice as many rows as ranks."""
    return torch.cat([part(rank * 4 + index, dtype) / 10.0 ** (3 * rank) for index in range(4)])


class Sharded(nn.Module):
    """A product whose inner dimension the ranks divide, and a gather of its columns."""

    def __init__(self, ranks: int, rank: int) -> None:
        super().__init__()
        whole = torch.randn(8, 4 * ranks, generator=torch.Generator().manual_seed(0))
        self.weight = nn.Parameter(whole[:, 4 * rank : 4 * rank + 4].clone(), requires_grad=False)
        self.along = Along("tp", ranks)

    def forward(self, x: Tensor) -> Tensor:
        return all_gather(all_reduce(linear(x, self.weight, None), self.along), self.along, -1)


def fails_on_the_last(axis: Axis, device: torch.device) -> str:
    if axis.index == axis.size - 1:
        raise RuntimeError("not permitted\nin this container")
    return "memory"


def on_ranks(world: World, folder: Path) -> dict[str, Any]:
    axis = Mesh.of(world, {"tp": world.size}).axis("tp")
    found: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        x = part(world.rank, dtype)
        kept = x.clone()
        for deterministic in (False, True):
            result = all_reduce.bind("cpu", deterministic=deterministic)(x, axis)
            found[f"{dtype} {deterministic}"] = result.float().tolist()
            assert result.dtype == dtype
        assert torch.equal(x, kept), "a collective must not write into its argument"
        rows = rows_of(world.rank, dtype)
        for deterministic in (False, True):
            run = reduce_scatter.bind("cpu", deterministic=deterministic)
            found[f"scattered {dtype} {deterministic}"] = run(rows, axis, 0).float().tolist()
            found[f"columns {dtype} {deterministic}"] = run(rows.T, axis, -1).float().tolist()
        found[f"exchanged {dtype}"] = all_to_all(rows, axis).float().tolist()
    for dim in (1, -1):
        found[f"gathered {dim}"] = all_gather(part(world.rank), axis, dim).tolist()
    x = torch.randn(5, 4 * world.size, generator=torch.Generator().manual_seed(1))
    graph = bind(capture(Sharded(world.size, world.rank)), "cpu", axes={"tp": axis})
    assert symmetric.with_symmetric_memory(axis, world.device) is axis, "there is none between processes of a CPU"
    symmetric._why_not = lambda *_: None
    symmetric._exchanged = fails_on_the_last
    assert symmetric.with_symmetric_memory(axis, world.device) is axis, "all ranks have it or none"
    found["graph"] = graph(x[:, 4 * world.rank : 4 * world.rank + 4]).tolist()
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_get_the_sums_and_the_columns_of_all(ranks: int, tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(on_ranks, ranks, tmp_path)):
        for dtype in (torch.float32, torch.bfloat16):
            held = [rows_of(peer, dtype) for peer in range(ranks)]
            own = added(held).chunk(ranks)[rank].float()
            assert found[f"scattered {dtype} True"] == own.tolist()
            assert found[f"columns {dtype} True"] == own.T.tolist()
            torch.testing.assert_close(torch.tensor(found[f"scattered {dtype} False"]), own, rtol=1e-2, atol=1e-2)
            torch.testing.assert_close(torch.tensor(found[f"columns {dtype} False"]), own.T, rtol=1e-2, atol=1e-2)
            assert found[f"exchanged {dtype}"] == torch.cat([one.chunk(ranks)[rank] for one in held]).tolist()
            whole = added([part(peer, dtype) for peer in range(ranks)])
            torch.testing.assert_close(torch.tensor(found[f"{dtype} False"]), whole.float(), rtol=1e-2, atol=1e-5)
            assert found[f"{dtype} True"] == whole.float().tolist(), "the order of the ranks"
        columns = torch.cat([part(rank) for rank in range(ranks)], 1)
        assert found["gathered 1"] == found["gathered -1"] == columns.tolist()
        weight = torch.randn(8, 4 * ranks, generator=torch.Generator().manual_seed(0))
        x = torch.randn(5, 4 * ranks, generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(torch.tensor(found["graph"]), (x @ weight.T).repeat(1, ranks), rtol=1e-5, atol=1e-5)


def test_along_one_rank_they_are_the_identity() -> None:
    x = part(0)
    for along in (ALONE, Along("tp", 1)):
        for deterministic in (False, True):
            assert all_reduce.bind("cpu", deterministic=deterministic)(x, along) is x
        assert all_gather(x, along, 1) is reduce_scatter(x, along, 1) is all_to_all(x, along) is x
        assert all_reduce.cost(x, along, workload=WORKLOAD) == Cost()
        for operation in (all_gather, reduce_scatter):
            assert operation.cost(x, along, 1, workload=WORKLOAD) == Cost()
        assert all_to_all.cost(x, along, workload=WORKLOAD) == Cost()


def test_costs_by_hand() -> None:
    """12 numbers of 2 bytes on each of 4 ranks. A rank sends 3 parts of 6 bytes, and 6 for the sum."""
    x, along = torch.empty(3, 4, dtype=torch.bfloat16, device="meta"), Along("tp", 4)
    assert all_reduce.cost(x, along, workload=WORKLOAD) == Cost(flops=9, read=24, written=24, messages=1, sent=36)
    # Of a result of 96 bytes, all parts but one pass through each rank.
    assert all_gather.cost(x, along, 1, workload=WORKLOAD) == Cost(read=24, written=96, messages=1, sent=72)
    assert reduce_scatter.cost(x, along, 1, workload=WORKLOAD) == Cost(9, 24, 6, messages=1, sent=18)
    assert reduce_scatter.meta(x, along, 1).shape == (3, 1)
    assert all_to_all.cost(x, along, workload=WORKLOAD) == Cost(read=24, written=24, messages=1, sent=18)


def test_a_captured_graph_is_costed_without_ranks_and_knows_its_collectives() -> None:
    graph = capture(Sharded(2, 0))
    collectives = [node for node in graph.graph.nodes if (found := operation_of(node)) and found.collective]
    assert [node.name for node in collectives] == ["all_reduce", "all_gather"]
    costs = {one.operation: one for one in node_costs(graph, torch.empty(3, 4, device="meta"), WORKLOAD)}
    assert costs["all_reduce"].shape == (3, 8)
    assert costs["all_gather"].shape == (3, 16)
    assert costs["all_reduce"].cost == Cost(flops=12, read=96, written=96, messages=1, sent=96)
    bound = bind(graph, "cuda", axes={"tp": Along("tp", 2)})
    again = {one.operation: one.cost for one in node_costs(bound, torch.empty(3, 4, device="meta"), WORKLOAD)}
    assert again == {name: one.cost for name, one in costs.items()}


def test_a_graph_needs_the_axis_of_its_collectives() -> None:
    with pytest.raises(ValueError, match=r"all_reduce .*needs the axis 'tp' of 2 ranks.* given none; hand it over"):
        bind(capture(Sharded(2, 0)), "cpu")
    with pytest.raises(ValueError, match=r"needs the axis 'tp' of 2 ranks.* given one of 1"):
        bind(capture(Sharded(2, 0)), "cpu", axes={"tp": ALONE})
    with pytest.raises(TypeError, match="bind the graph with axes"):
        capture(Sharded(2, 0))(torch.zeros(3, 4))


def test_what_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="3 rows do not divide into 2 parts"):
        reduce_scatter.meta(part(0), Along("tp", 2), 1)
    with pytest.raises(ValueError, match="2 rows do not divide into 4 parts"):
        all_to_all(part(0), Along("tp", 4))


def test_rows_are_not_gathered() -> None:
    with pytest.raises(ValueError, match="would mix rows"):
        all_gather(part(0), Along("tp", 1), -2)
