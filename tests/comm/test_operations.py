"""Collectives as operations over gloo ranks, and messages between stages, of tokens and under way; costs by hand."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strata.comm import operations, symmetric
from strata.comm.collectives import Transfer, start_transfers
from strata.comm.launch import World
from strata.comm.mesh import Axis, Mesh
from strata.comm.observer import CollectiveCall
from strata.comm.operations import (
    Along,
    all_gather,
    all_reduce,
    all_to_all,
    pairwise_all_reduce,
    receive_previous,
    reduce_scatter,
    send_next,
)
from strata.comm.peer_copies import fits, with_peer_copies
from strata.comm.token_messages import gather_keys_values, gather_tokens
from strata.comm.under_way import finish_add_rms_norm, finish_all_reduce, start_all_reduce
from strata.cost.nodes import node_costs
from strata.graph.bind import bind
from strata.graph.trace import operation_of, trace
from strata.hardware.roofline import Cost, Workload
from strata.kernels.linear.linear import linear
from strata.kernels.norm.norm import add_rms_norm
from tests.parallel.ranks import run_each

ALONE = Axis("tp", 1, 0, (0,), None)
WORKLOAD = Workload((3,), (3,))


def part_of(rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
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
    return torch.cat([part_of(rank * 4 + index, dtype) / 10.0 ** (3 * rank) for index in range(4)])


FoundBy = Callable[[int], dict[str, list[Any]]]


@pytest.fixture(scope="module")
def found_by(tmp_path_factory: pytest.TempPathFactory) -> FoundBy:
    """What so many ranks find, which are started once."""
    # The last leaves no symmetric memory.
    runs: dict[int, list[Callable[..., Any]]] = {
        2: [pairwise_sums, tokens, under_way, sums_and_columns],
        3: [stages, around],
        4: [pairwise_sums, sums_and_columns],
    }
    return functools.cache(lambda ranks: run_each(runs[ranks], ranks, tmp_path_factory.mktemp("ranks")))


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


def sums_and_columns(world: World, folder: Path) -> dict[str, Any]:
    axis = Mesh.of(world, {"tp": world.size}).axis("tp")
    found: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        x = part_of(world.rank, dtype)
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
        found[f"gathered {dim}"] = all_gather(part_of(world.rank), axis, dim).tolist()
    x = torch.randn(5, 4 * world.size, generator=torch.Generator().manual_seed(1))
    graph = bind(trace(Sharded(world.size, world.rank)), "cpu", axes={"tp": axis})
    assert symmetric.with_symmetric_memory(axis, world.device) is axis, "there is none between processes of a CPU"
    symmetric._why_not = lambda *_: None
    symmetric._exchanged = fails_on_the_last
    assert symmetric.with_symmetric_memory(axis, world.device) is axis, "all ranks have it or none"
    found["graph"] = graph(x[:, 4 * world.rank : 4 * world.rank + 4]).tolist()
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_get_the_sums_and_the_columns_of_all(ranks: int, found_by: FoundBy) -> None:
    for rank, found in enumerate(found_by(ranks)["sums_and_columns"]):
        for dtype in (torch.float32, torch.bfloat16):
            held = [rows_of(peer, dtype) for peer in range(ranks)]
            own = added(held).chunk(ranks)[rank].float()
            assert found[f"scattered {dtype} True"] == own.tolist()
            assert found[f"columns {dtype} True"] == own.T.tolist()
            torch.testing.assert_close(torch.tensor(found[f"scattered {dtype} False"]), own, rtol=1e-2, atol=1e-2)
            torch.testing.assert_close(torch.tensor(found[f"columns {dtype} False"]), own.T, rtol=1e-2, atol=1e-2)
            assert found[f"exchanged {dtype}"] == torch.cat([one.chunk(ranks)[rank] for one in held]).tolist()
            whole = added([part_of(peer, dtype) for peer in range(ranks)])
            torch.testing.assert_close(torch.tensor(found[f"{dtype} False"]), whole.float(), rtol=1e-2, atol=1e-5)
            assert found[f"{dtype} True"] == whole.float().tolist(), "the order of the ranks"
        columns = torch.cat([part_of(rank) for rank in range(ranks)], 1)
        assert found["gathered 1"] == found["gathered -1"] == columns.tolist()
        weight = torch.randn(8, 4 * ranks, generator=torch.Generator().manual_seed(0))
        x = torch.randn(5, 4 * ranks, generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(torch.tensor(found["graph"]), (x @ weight.T).repeat(1, ranks), rtol=1e-5, atol=1e-5)


def test_along_one_rank_they_are_the_identity() -> None:
    x = part_of(0)
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
    graph = trace(Sharded(2, 0))
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
        bind(trace(Sharded(2, 0)), "cpu")
    with pytest.raises(ValueError, match=r"needs the axis 'tp' of 2 ranks.* given one of 1"):
        bind(trace(Sharded(2, 0)), "cpu", axes={"tp": ALONE})
    with pytest.raises(TypeError, match="bind the graph with axes"):
        trace(Sharded(2, 0))(torch.zeros(3, 4))


def test_what_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="3 rows do not divide into 2 parts"):
        reduce_scatter.meta(part_of(0), Along("tp", 2), 1)
    with pytest.raises(ValueError, match="2 rows do not divide into 4 parts"):
        all_to_all(part_of(0), Along("tp", 4))


def test_rows_are_not_gathered() -> None:
    with pytest.raises(ValueError, match="would mix rows"):
        all_gather(part_of(0), Along("tp", 1), -2)


def rows_to_add(rank: int) -> Tensor:
    """[7, 3], of magnitudes so far apart that the order of a sum shows in its last bits."""
    return torch.randn(7, 3, generator=torch.Generator().manual_seed(rank)).mul(10.0**rank)


def pairwise_sums(world: World, folder: Path) -> dict[str, object]:
    axis = Mesh.of(world, {"tp": world.size}).axis("tp")
    run = pairwise_all_reduce.bind("cpu", deterministic=True)
    x = rows_to_add(world.rank)
    found: dict[str, object] = {"whole": run(x, axis).tolist(), "none": run(x[:0], axis).shape[0]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operations, "_GATHERED_BYTES", 2 * world.size * x[0].nbytes)  # two rows at once, and one at last
        found["pieces"] = run(x, axis).tolist()
    assert torch.equal(x, rows_to_add(world.rank)), "a collective must not write into its argument"
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_neighbours_are_added_first(ranks: int, found_by: FoundBy) -> None:
    x = [rows_to_add(rank) for rank in range(ranks)]
    expected = x[0] + x[1] if ranks == 2 else (x[0] + x[1]) + (x[2] + x[3])
    if ranks == 4:
        assert not torch.equal(expected, ((x[0] + x[1]) + x[2]) + x[3])
    for found in found_by(ranks)["pairwise_sums"]:
        assert found == {"whole": expected.tolist(), "pieces": expected.tolist(), "none": 0}


def stages(world: World, folder: Path) -> list[Any]:
    """Two messages from the first rank to the last, each rank adding its number to them on the way."""
    axis = Mesh.of(world, {"pp": world.size}).axis("pp")
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        rows = torch.zeros(3, dtype=torch.int32)
        x = torch.arange(12, dtype=dtype).view(4, 3).T  # not contiguous
        if axis.index:
            x = receive_previous.bind("cpu", deterministic=True)(rows, axis, 4, dtype)
            assert (x.shape, x.dtype) == ((3, 4), dtype)
        x = x + axis.index
        if axis.index + 1 < axis.size:
            assert send_next.bind("cpu", deterministic=True)(x, axis) is x
        found.append(x.float().tolist())
    return found


def test_what_a_stage_sends_the_next_receives(found_by: FoundBy) -> None:
    sent = torch.arange(12.0).view(4, 3).T
    for rank, found in enumerate(found_by(3)["stages"]):
        assert found == [(sent + sum(range(rank + 1))).tolist()] * 2


def test_costs_of_stages_by_hand() -> None:
    """12 numbers of 2 bytes, counted where they are sent."""
    x, along = torch.empty(3, 4, dtype=torch.bfloat16, device="meta"), Along("pp", 4)
    rows = torch.empty(3, dtype=torch.int32, device="meta")
    assert send_next.cost(x, along, workload=WORKLOAD) == Cost(read=24, messages=1, sent=24)
    assert receive_previous.cost(rows, along, 4, torch.bfloat16, workload=WORKLOAD) == Cost(written=24)
    assert receive_previous.meta(rows, along, 4, torch.bfloat16).shape == (3, 4)


def test_the_ends_have_no_neighbour() -> None:
    rows = torch.zeros(3, dtype=torch.int32)
    with pytest.raises(ValueError, match="rank 1 is the last of 2 along 'pp': none comes after it"):
        send_next(torch.zeros(3, 4), Axis("pp", 2, 1, (0, 1), None))
    with pytest.raises(ValueError, match="rank 0 is the first along 'pp': none comes before it"):
        receive_previous(rows, Axis("pp", 2, 0, (0, 1), None), 4, torch.float32)


def tokens_of(rank: int) -> torch.Tensor:
    return torch.arange(12, dtype=torch.bfloat16).view(3, 2, 2).transpose(0, 1) + 100 * rank  # not contiguous


def tokens(world: World, folder: Path) -> list[Any]:
    axis = Mesh.of(world, {"cp": world.size}).axis("cp")
    x = tokens_of(axis.index)
    keys, values = gather_keys_values.bind("cpu", deterministic=True)(x, axis, -x)
    assert keys.stride()[1:] == values.stride()[1:] == (2, 1)
    gather = gather_tokens.bind("cpu", deterministic=True)
    assert gather(x[:0], axis).shape == (0, 3, 2)
    return [found.float().tolist() for found in (gather(x, axis), keys, -values)]


def test_ranks_have_the_tokens_of_all(found_by: FoundBy) -> None:
    wanted = torch.cat([tokens_of(0), tokens_of(1)]).float().tolist()
    assert found_by(2)["tokens"] == [[wanted] * 3] * 2


def test_costs_of_tokens_by_hand() -> None:
    """24 bytes a rank, and twice that of keys and values, which are copied side by side."""
    x, along = torch.empty(2, 3, 2, dtype=torch.bfloat16, device="meta"), Along("cp", 4)
    assert gather_tokens.cost(x, along, workload=WORKLOAD) == Cost(read=24, written=96, messages=1, sent=72)
    pair = Cost(read=48 + 48, written=48 + 192, messages=1, sent=144)
    assert gather_keys_values.cost(x, along, x, workload=WORKLOAD) == pair
    assert gather_tokens.cost(x[:0], along, workload=WORKLOAD) == Cost()
    assert gather_tokens.meta(x, along).shape == (8, 3, 2)
    assert [found.shape for found in gather_keys_values.meta(x, along, x)] == [(8, 3, 2)] * 2


def test_one_rank_sends_nothing() -> None:
    x, alone = torch.zeros(2, 3, 2), Along("cp", 1)
    assert gather_tokens(x, alone) is x
    assert all(found is x for found in gather_keys_values(x, alone, x))
    assert gather_keys_values.cost(x, alone, x, workload=WORKLOAD) == Cost()


class Noted:
    """An observer that counts calls by who they are between, and notes those that were waited for."""

    def __init__(self) -> None:
        self.begun: list[CollectiveCall] = []
        self.awaited: list[CollectiveCall | None] = []

    def started(self, operation: str, axis: str, ranks: tuple[int, ...], nbytes: int) -> CollectiveCall:
        number = 1 + sum(call.ranks == ranks for call in self.begun)
        self.begun.append(CollectiveCall(operation, axis, ranks, number, nbytes))
        return self.begun[-1]

    def waits(self, call: CollectiveCall | None) -> None:
        self.awaited.append(call)


def around(world: World, folder: Path) -> dict[str, Any]:
    """Twice to the next rank of a ring, in one message each time, then back once from 1 to 0."""
    noted = Noted()
    axis = Mesh.of(dataclasses.replace(world, observer=noted), {"pp": world.size}).axis("pp")
    next_, before = (axis.index + 1) % axis.size, (axis.index - 1) % axis.size
    got = []
    for turn in range(2):
        out = torch.full((3,), 10.0 * turn + axis.index)
        arrives = torch.empty(3)
        start_transfers([Transfer(out, axis.index, next_), Transfer(arrives, before, axis.index)], axis).wait()
        got.append(arrives.tolist())
    if axis.index < 2:
        tensor = torch.full((5,), float(axis.index))
        start_transfers([Transfer(tensor, 1, 0)], axis).wait()
        got.append(tensor.tolist())
    assert noted.awaited[-1] is None
    return {"got": got, "calls": [call for call in noted.begun if call.operation == "transfer"]}


def test_transfers_arrive_and_are_told_of_alike(found_by: FoundBy) -> None:
    found = found_by(3)["around"]
    for rank, one in enumerate(found):
        before = (rank - 1) % 3
        assert one["got"][:2] == [[before] * 3, [10 + before] * 3]
    assert found[0]["got"][2] == found[1]["got"][2] == [1.0] * 5
    # Each of the 3 links twice and one the other way once, told by both of its ends with the same number and size.
    told = sorted(str(call) for one in found for call in one["calls"])
    assert len(told) == 14
    assert told[::2] == told[1::2]
    assert len(set(told)) == 7


def under_way(world: World, folder: Path) -> list[list[float]]:
    axis = Mesh.of(world, {"tp": world.size}).axis("tp")
    start, finish = start_all_reduce.bind("cpu"), finish_all_reduce.bind("cpu")
    parts = [torch.full((2, 3), 10.0**part * (world.rank + 1)) for part in range(2)]
    pending = [start(part, axis, number) for number, part in enumerate(parts)]
    assert with_peer_copies(axis, world.device, 2, 1 << 20) is axis, "there are no copy engines"
    sums = [finish(one).flatten().tolist() for one in pending]
    residual, weight = torch.arange(6.0).view(2, 3), torch.tensor([1.0, 2.0, 3.0])
    x = torch.full((2, 3), float(world.rank))
    for kind in ("cpu", "reference"):
        found = finish_add_rms_norm.bind(kind)(start(x.clone(), axis, 0), residual, weight, 1e-5)
        wanted = add_rms_norm.reference(torch.ones(2, 3), residual, weight, 1e-5)
        assert all(map(torch.allclose, found, wanted))
    return sums


def test_sums_under_way_together(found_by: FoundBy) -> None:
    for found in found_by(2)["under_way"]:
        assert found == [[3.0] * 6, [30.0] * 6]


def test_the_message_is_counted_where_it_begins() -> None:
    x, along, workload = torch.empty(4, 8, device="meta"), Along("tp", 2), Workload((4,), (4,))
    pending = start_all_reduce.meta(x, along, 0)
    assert pending.shape == (4, 8)
    assert finish_all_reduce.meta(pending).shape == (4, 8)
    assert start_all_reduce.cost(x, along, 0, workload=workload).sent == x.nbytes
    assert finish_all_reduce.cost(pending, workload=workload).bytes == 0
    assert not fits(x, along, 0)


def test_along_one_rank_nothing_travels() -> None:
    x = torch.randn(2, 3)
    alone = Axis("tp", 1, 0, (0,), None)
    for kind in ("cpu", "reference"):
        assert finish_all_reduce.bind(kind)(start_all_reduce.bind(kind)(x, alone, 0)) is x
